"""A scripted handler under the real SDK: what a request asks for in "do" is done, step by step.

    {"do": [["say", "text"], ["sleep", 0.5], ["object", {...}], ["fail", 404, "message"], ["raise", "text"],
            ["exit", 9], ["many", 1000, "text"]]}

in openai_input, or directly in the input of a raw job. Without "do" it answers with what it got. It prints how each
job ended, and starts no engine: the gateway is tested with it alone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import runpod

MODEL = "echo/echo-1"
CONCURRENCY = int(os.environ.get("ECHO_CONCURRENCY", "34"))


def event(text: str) -> str:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
             "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}  # fmt: skip
    return f"data: {json.dumps(chunk)}\n\n"


def envelope(status: int, message: str, retry_after_s: float | None = None) -> dict[str, str]:
    error = {"message": message, "type": "invalid_request_error", "param": "do", "code": "scripted"}
    return {"error": json.dumps({"status": status, "error": error, "retry_after_s": retry_after_s})}


async def steps(script: list[list[Any]]) -> AsyncIterator[Any]:
    for name, *values in script:
        if name == "say":
            yield event(values[0])
        elif name == "text" or name == "object":
            yield values[0]
        elif name == "nan":
            yield {"value": float("nan")}
        elif name == "sleep":
            await asyncio.sleep(values[0])
        elif name == "many":
            for number in range(values[0]):
                yield event(f"{number} {values[1]}")
        elif name == "fail":
            yield envelope(*values)
        elif name == "raise":
            raise RuntimeError(values[0])
        elif name == "exit":
            os._exit(values[0])


async def handler(job: dict[str, Any]) -> AsyncIterator[Any]:
    task = asyncio.current_task()
    assert task is not None
    print(f"echo: {job['id']} started", flush=True)
    task.add_done_callback(
        lambda done: print(f"echo: {job['id']} {'cancelled' if done.cancelled() else 'ended'}", flush=True)
    )
    given = job["input"]
    route, body = given.get("openai_route"), given.get("openai_input", given)
    if route == "/v1/models":
        yield {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "echo"}]}
    elif route == "/metrics":
        yield "# TYPE echo counter\necho 1\n"
    elif "do" in body:
        async for output in steps(body["do"]):
            yield output
    elif body.get("stream"):
        for word in body["messages"][-1]["content"].split(" "):
            yield event(word + " ")
        yield "data: [DONE]\n\n"
    else:
        content = json.dumps(given)
        yield {"id": "c", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}]}  # fmt: skip


if __name__ == "__main__":
    runpod.serverless.start(
        {
            "handler": handler,
            "return_aggregate_stream": True,
            "concurrency_modifier": lambda current: CONCURRENCY,
        }
    )
