"""Where the time to the first token goes, over worker-paged's whole path.

    python -m benchmarks.first_token [--concurrency 1 8] [--repeats 10]

Bursts of as many requests as the concurrency, distinct prompts of 127 tokens; means in milliseconds of

    to the handler   sent -> the handler has the job: gateway, queue, and the SDK, which asks for jobs every 0.1 s
    first token      from there until the worker has the first token: prompt, engine
    to the client    from there until the client has read it

The two ends are the client's own clock, the two in between are what the worker logs of each request, on the same
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from datetime import datetime
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks import load, machine, peers
from benchmarks.load import Workload

OUTPUT_TOKENS = 8
LOGGED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) INFO completions .* first token (\d+) ms, all (\d+) ms")


def logged(log_file: Path) -> list[tuple[float, float]]:
    """Of every request so far: when its handler began (seconds since the epoch); ms from there to the first token."""
    found = []
    for when, first_ms, all_ms in LOGGED.findall(log_file.read_text(encoding="utf-8", errors="replace")):
        ended = datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp()
        found.append((ended - float(all_ms) / 1000, float(first_ms)))
    return found


def measure(running: peers.Running, tokenizer: Tokenizer, concurrency: int, repeats: int) -> dict[str, float]:
    """Milliseconds by part; medians of the bursts' means."""
    workload = Workload(concurrency=concurrency, requests=concurrency, output_tokens=OUTPUT_TOKENS)
    parts: dict[str, list[float]] = {"to the handler": [], "first token": [], "to the client": []}
    for repeat in range(repeats + 1):
        texts = list(load.prompts(tokenizer, workload, f"first token, {concurrency}, {repeat}"))
        machine.wait_for_quiet(10)
        before, sent = len(logged(peers.log_file(running.peer))), time.time()
        result = asyncio.run(load.run(running.base_url, running.model, texts, workload))
        time.sleep(0.5)  # the last lines of the log
        requests = logged(peers.log_file(running.peer))[before:]
        if len(requests) != concurrency:
            raise SystemExit(f"{len(requests)} requests are in the log, not {concurrency}")
        if not repeat:
            continue  # the first burst warms up
        to_handler = 1000 * (statistics.mean(began for began, _ in requests) - sent)
        first_token = statistics.mean(first_ms for _, first_ms in requests)
        parts["to the handler"].append(to_handler)
        parts["first token"].append(first_token)
        parts["to the client"].append(1000 * result.ttft_s["mean"] - to_handler - first_token)
    return {name: statistics.median(values) for name, values in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    from builder.demo_model import ensure

    model = ensure()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with peers.started(peers.WORKER_PAGED, model, dtype=machine.fast_dtype(), threads=2) as running:
        found = {size: measure(running, tokenizer, size, options.repeats) for size in options.concurrency}
    print(f"{'ms at concurrency':18}" + "".join(f"{size:>9}" for size in found))
    for name in next(iter(found.values())):
        print(f"{name:18}" + "".join(f"{parts[name]:9.1f}" for parts in found.values()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
