"""The job API, as a client of the platform uses it."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served


def post(echo: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{echo.jobs_url}/{path}", json=body, timeout=30)


def run(echo: Served, *do: Any, **rest: Any) -> str:
    answer = post(echo, "run", input={"do": list(do)}, **rest)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "IN_QUEUE"
    return str(answer.json()["id"])


def status(echo: Served, job_id: str) -> dict[str, Any]:
    answer = httpx.get(f"{echo.jobs_url}/status/{job_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def until(echo: Served, job_id: str, *wanted: str, timeout_s: float = 20) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while (view := status(echo, job_id))["status"] not in wanted:
        assert time.monotonic() < deadline, view
        time.sleep(0.05)
    return view


def test_run_and_status(echo: Served) -> None:
    view = until(echo, run(echo, ["object", {"a": 1}], ["sleep", 0.2], ["text", "b"]), "COMPLETED")
    assert view["output"] == [{"a": 1}, "b"]
    assert view["executionTime"] >= 200 and view["delayTime"] >= 0 and view["workerId"].startswith("local-")


def test_runsync_waits_for_the_end_or_for_as_long_as_asked(echo: Served) -> None:
    quick = post(echo, "runsync", input={"do": [["object", {"a": 1}]]}).json()
    assert quick["status"] == "COMPLETED" and quick["output"] == [{"a": 1}] and quick["id"].startswith("sync-")
    slow = post(echo, "runsync?wait=1000", input={"do": [["sleep", 1.5]]}).json()
    assert slow["status"] == "IN_PROGRESS"
    until(echo, slow["id"], "COMPLETED")


def test_stream_gives_every_chunk_once_and_ends(echo: Served) -> None:
    job_id = run(echo, ["text", "a"], ["sleep", 0.3], ["text", "b"], ["object", {"c": 1}])
    chunks, rounds = [], 0
    while True:
        view = httpx.get(f"{echo.jobs_url}/stream/{job_id}").json()
        chunks += [entry["output"] for entry in view["stream"]]
        rounds += 1
        if view["status"] == "COMPLETED" and not view["stream"]:
            break
    assert chunks == ["a", "b", {"c": 1}] and rounds < 10


def test_cancel_stops_the_running_job(echo: Served) -> None:
    job_id = run(echo, ["text", "a"], ["sleep", 30])
    until(echo, job_id, "IN_PROGRESS")
    echo.wait_for_line(f"{job_id} started")
    assert post(echo, f"cancel/{job_id}").json() == {"id": job_id, "status": "CANCELLED"}
    echo.wait_for_line(f"{job_id} cancelled")
    assert status(echo, job_id)["status"] == "CANCELLED"


def test_a_stop_that_came_before_the_start_is_repeated_until_it_works(echo: Served) -> None:
    job_id = run(echo, ["sleep", 30])
    until(echo, job_id, "IN_PROGRESS")  # taken, but the SDK needs up to 0.1 s more to start it
    post(echo, f"cancel/{job_id}")
    echo.wait_for_line(f"{job_id} (cancelled|ended)")


def test_execution_timeout_stops_the_job(echo: Served) -> None:
    job_id = run(echo, ["sleep", 60], policy={"executionTimeout": 5000})
    view = until(echo, job_id, "TIMED_OUT", timeout_s=20)
    assert "5 s" in view["error"]
    echo.wait_for_line(f"{job_id} cancelled")


def test_retry_runs_a_failed_job_again_under_its_id(echo: Served) -> None:
    job_id = run(echo, ["raise", "oops at /srv"])
    failed = until(echo, job_id, "FAILED")
    assert "oops" in failed["error"] and "traceback" not in failed["error"]
    assert post(echo, f"retry/{job_id}").json() == {"id": job_id, "status": "IN_QUEUE"}
    until(echo, job_id, "FAILED")
    done = run(echo, ["text", "x"])
    until(echo, done, "COMPLETED")
    assert post(echo, f"retry/{done}").status_code == 409


def test_the_error_of_a_failed_job_is_the_workers_own_text(echo: Served) -> None:
    view = until(echo, run(echo, ["fail", 404, "no such model"]), "FAILED")
    assert '"status": 404' in view["error"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "text"}, "input"),
        ({"input": {}, "policy": 5}, "policy"),
        ({"input": {}, "policy": {"executionTimeout": 10}}, "policy.executionTimeout"),
        ({"input": {}, "policy": {"ttl": "day"}}, "policy.ttl"),
        ({"input": {}, "webhook": "http://127.0.0.1:9/x"}, "webhook"),
    ],
)
def test_bad_job_requests_name_the_field(echo: Served, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{echo.jobs_url}/run", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_run_takes_ten_megabytes_and_runsync_twenty(echo: Served) -> None:
    twelve = {"do": [["object", {"ok": True}]], "padding": "x" * 12_000_000}
    assert post(echo, "run", input=twelve).status_code == 413
    assert post(echo, "runsync", input=twelve).json()["output"] == [{"ok": True}]


def test_health_counts_jobs_and_workers(echo: Served) -> None:
    before = httpx.get(f"{echo.jobs_url}/health").json()
    assert set(before["jobs"]) == {"completed", "failed", "inProgress", "inQueue", "retried"}
    job_id = run(echo, ["sleep", 0.5])
    until(echo, job_id, "IN_PROGRESS")
    during = httpx.get(f"{echo.jobs_url}/health").json()
    assert during["jobs"]["inProgress"] >= 1 and during["workers"]["running"] == 1
    until(echo, job_id, "COMPLETED")
    after = httpx.get(f"{echo.jobs_url}/health").json()
    assert after["jobs"]["completed"] > before["jobs"]["completed"]
    assert httpx.get(f"{echo.origin}/health").status_code == 200
