"""Engines alone, without a server, in turns: worker-paged's engine, OpenVINO GenAI, transformers' generate.

    python -m benchmarks.offline_peers [--engines openvino-genai ...] [--workloads "8 streams" ...] [--repeats 3]

Every turn starts each engine anew in a process and an environment of its own, warms it up and measures every workload:
output tokens a second over the whole run, prompts included. The workloads are those of benchmarks.side_by_side. Prompts
are token ids; an engine that makes another number of tokens is an error. Writes benchmarks/results/<date>-offline.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import gguf_file, machine
from benchmarks.load import WORKLOADS, token_prompts
from benchmarks.peers import CACHE, ROOT, TRANSFORMERS_SERVE, Peer, PeerError
from benchmarks.side_by_side import write

OURS = "worker-paged-engine"
OPENVINO = Peer(
    name="openvino-genai",
    folder="openvino",
    requirements=("openvino-genai==2026.4.1.0",),
    command=(),
)
HOMES = {OPENVINO.name: OPENVINO, "transformers-generate": TRANSFORMERS_SERVE}
MAX_TRIES = 3
RUN_TIMEOUT_S = 900
Row = dict[str, Any]


def run_ours(model: Path, labels: list[str], dtype: str, threads: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "engine.json"
        command = [sys.executable, "-m", "benchmarks.engine", "--model", str(model), "--dtype", dtype]
        command += ["--threads", str(threads), "--repeats", "1", "--json", str(file), "--workloads", *labels]
        _call(command, None)
        found = json.loads(file.read_text())
    return {label: found[label][0]["output_tokens_per_s"] for label in labels}


def run_peer(name: str, model: Path, labels: list[str], dtype: str, threads: int, turn: int) -> dict[str, float]:
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    task = {
        "engine": name,
        "model": str(model),
        "gguf": str(gguf_file.ensure(model, CACHE / "gguf", "f16")),  # OpenVINO's reader takes no bf16
        "dtype": dtype,
        "threads": threads,
        "workloads": {
            label: {
                "concurrency": WORKLOADS[label].concurrency,
                "output_tokens": WORKLOADS[label].output_tokens,
                "prompts": token_prompts(WORKLOADS[label], vocab_size, f"{label}, turn {turn}"),
            }
            for label in labels
        },
    }
    python = HOMES[name].programs / "python"
    # -P: this folder has a module called profile, which must not hide Python's own.
    output = _call([str(python), "-P", str(ROOT / "benchmarks" / "offline_engines.py")], json.dumps(task))
    speeds = {}
    for label, found in json.loads(output.splitlines()[-1])["workloads"].items():
        workload = WORKLOADS[label]
        if found["output_tokens"] != workload.requests * workload.output_tokens:
            raise PeerError(f"{name} made {found['output_tokens']} tokens in '{label}'")
        speeds[label] = found["output_tokens"] / found["seconds"]
    return speeds


def _call(command: list[str], text: str | None) -> str:
    done = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        raise PeerError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300])
    return done.stdout


def table(rows: list[Row], labels: list[str]) -> str:
    """Markdown: medians over the turns, and ours to the best other (median of the ratios within a turn)."""
    names = list(dict.fromkeys(row["engine"] for row in rows))
    lines = ["| engine alone, output tokens/s | " + " | ".join(labels) + " |", "|---" * (len(labels) + 1) + "|"]
    for name in names:
        cells = [statistics.median(row["speeds"][label] for row in rows if row["engine"] == name) for label in labels]
        lines.append(f"| {name} | " + " | ".join(f"{cell:.4g}" for cell in cells) + " |")
    by_turn: dict[int, dict[str, dict[str, float]]] = {}
    for row in rows:
        by_turn.setdefault(row["turn"], {})[row["engine"]] = row["speeds"]
    whole = [speeds for speeds in by_turn.values() if OURS in speeds and len(speeds) > 1]
    if whole:
        cells = []
        for label in labels:
            found = [
                speeds[OURS][label] / max(speed[label] for name, speed in speeds.items() if name != OURS)
                for speeds in whole
            ]
            cells.append(f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})")
        lines.append(f"| **{OURS} / best other** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compare(names: list[str], labels: list[str], model: Path, dtype: str, threads: int, repeats: int) -> list[Row]:
    rows: list[Row] = []
    names = list(names)
    for name in [name for name in names if name in HOMES]:
        try:
            HOMES[name].install()
        except PeerError as error:
            print(f"left out: {error}")
            names.remove(name)
    for turn in range(1, repeats + 1):
        for name in list(names):
            machine.wait_for_quiet()
            try:
                if name == OURS:
                    speeds = run_ours(model, labels, dtype, threads)
                else:
                    speeds = run_peer(name, model, labels, dtype, threads, turn)
            except (PeerError, subprocess.TimeoutExpired) as error:
                print(f"left out: {name}: {error}", flush=True)
                names.remove(name)
                continue
            rows.append({"engine": name, "turn": turn, "speeds": speeds})
            print(f"  turn {turn}  {name:22} " + "  ".join(f"{speeds[label]:8.1f}" for label in labels), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", nargs="*", default=[OURS, *HOMES], choices=[OURS, *HOMES])
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--model", type=Path, help="model folder; default: the demo model")
    parser.add_argument("--dtype", default=machine.fast_dtype())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default=f"{datetime.date.today()}-offline", help="of the file in benchmarks/results")
    arguments = parser.parse_args()
    if arguments.model is None:
        from builder.demo_model import ensure

        arguments.model = ensure(print)
    rows = compare(
        arguments.engines,
        arguments.workloads,
        arguments.model,
        arguments.dtype,
        arguments.threads,
        arguments.repeats,
    )
    versions = {name: HOMES[name].version() for name in arguments.engines if name in HOMES}
    write(arguments, rows, table(rows, arguments.workloads), {"versions": versions})


if __name__ == "__main__":
    main()
