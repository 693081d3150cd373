"""Worker-paged and its peers on this machine, over HTTP, in turns: A B C A B C, so that its drifting hits all alike.

    python -m benchmarks.side_by_side [--peers worker-paged llama-server ...] [--workloads "8 streams" ...]
                                      [--repeats 3] [--dtype float32]

All servers are started once, warmed up, then measured one after the other; a server that takes CPU time while idle is
stopped (SIGSTOP) while others are measured. A measurement waits for a quiet second and is repeated when other
processes took more than 5 % of the machine meanwhile. Every server gets the same prompts and must answer with the same
number of tokens, or it is left out. Compared are ratios within a turn, never figures of different turns.

Writes benchmarks/results/<date>.json (all measurements) and .md (the tables, also printed).
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import signal
import statistics
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import load, machine, peers
from benchmarks.load import WORKLOADS
from benchmarks.peers import Running

RESULTS = Path(__file__).parent / "results"
MAX_TRIES = 4  # of one measurement, when others disturb it
IDLE_SHARE = 0.03  # of a core: a server that takes more while idle is stopped while others work
OURS = peers.WORKER_PAGED.name
Row = dict[str, Any]


def measure(running: Running, label: str, turn: int, tokenizer: Tokenizer) -> Row:
    """One measurement, repeated while it is disturbed; the last try counts and says how disturbed it was."""
    workload = WORKLOADS[label]
    for attempt in range(MAX_TRIES):
        texts = list(load.prompts(tokenizer, workload, f"{label}, turn {turn}, attempt {attempt}"))
        machine.wait_for_quiet(running.pid)
        with machine.watched(running.pid) as seen:
            result = asyncio.run(
                load.run(running.base_url, running.model, texts, workload, extra_body=running.peer.body)
            )
        if not seen.too_much:
            break
    return row(running.peer.name, label, turn, result, seen, machine.rss_bytes(running.pid))


def row(name: str, label: str, turn: int, result: load.Result, seen: machine.Disturbance, rss_bytes: int) -> Row:
    return {
        **result.as_json(),
        "peer": name,
        "workload": label,  # WORKLOADS says what it is
        "turn": turn,
        "others_share": seen.share,
        "server_cpu_s": seen.server_cpu_s,
        "server_rss_bytes": rss_bytes,
    }


class Comparison:
    """The servers that still take part. A server that fails is left out from then on, with its reason."""

    def __init__(self, model: Path, *, dtype: str, threads: int) -> None:
        self.model, self.dtype, self.threads = model, dtype, threads
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.servers: list[Running] = []
        self.restless: set[str] = set()  # stopped while others work
        self.about: dict[str, dict[str, Any]] = {}
        self.rows: list[Row] = []

    def start(self, peer: peers.Peer, stack: ExitStack) -> None:
        self.about[peer.name] = {"version": peer.version(), "command": " ".join(peer.command)}
        try:
            peer.install()
            context = peers.started(peer, self.model, dtype=self.dtype, threads=self.threads)
            running = stack.enter_context(context)
            self.servers.append(running)
            self.warm_up(running)
        except (peers.PeerError, load.LoadError) as error:
            self._leave_out(peer.name, error)
            return
        idle = machine.idle_share(running.pid)
        self.about[peer.name] |= {"start_s": running.start_s, "idle_share": idle}
        print(f"{peer.name}: serving after {running.start_s:.1f} s, {idle:.1%} of a core while idle", flush=True)
        if idle > IDLE_SHARE:
            self.restless.add(peer.name)
            machine.suspend(running.pid)

    def warm_up(self, running: Running) -> None:
        """Every batch size once, and the shared prefix into the caches of those that have one."""
        for label, workload in WORKLOADS.items():
            short = replace(workload, requests=workload.concurrency, output_tokens=8)
            texts = list(load.prompts(self.tokenizer, short, f"{label}, warm-up"))
            asyncio.run(load.run(running.base_url, running.model, texts, short, extra_body=running.peer.body))

    def turn(self, number: int, labels: list[str]) -> None:
        for label in labels:
            for running in list(self.servers):
                try:
                    measured = self.measure(running, label, number)
                except load.LoadError as error:
                    self._leave_out(running.peer.name, error)
                    continue
                self.rows.append(measured)
                print(
                    f"  turn {number}  {label:14} {running.peer.name:20} {measured['output_tokens_per_s']:8.1f}"
                    f" tokens/s  (others took {measured['others_share']:.1%})",
                    flush=True,
                )

    def measure(self, running: Running, label: str, turn: int) -> Row:
        restless = running.peer.name in self.restless
        if restless:
            machine.resume(running.pid)
        try:
            return measure(running, label, turn, self.tokenizer)
        finally:
            if restless:
                machine.suspend(running.pid)

    def _leave_out(self, name: str, error: Exception) -> None:
        print(f"left out: {name}: {error}", flush=True)
        self.about[name]["left_out"] = str(error)
        self.servers = [running for running in self.servers if running.peer.name != name]


def compare(names: list[str], labels: list[str], repeats: int, comparison: Comparison) -> None:
    with ExitStack() as stack:
        for name in names:
            comparison.start(peers.ALL[name], stack)
        for number in range(1, repeats + 1):
            comparison.turn(number, labels)


def ratios(rows: list[Row], label: str) -> list[float]:
    """Ours to the best peer's output tokens a second, one figure a turn."""
    found = []
    for turn in sorted({row["turn"] for row in rows}):
        speed = {
            row["peer"]: row["output_tokens_per_s"] for row in rows if row["turn"] == turn and row["workload"] == label
        }
        ours = speed.pop(OURS, None)
        others = [value for name, value in speed.items() if not name.startswith(OURS)]
        if ours and others:
            found.append(ours / max(others))
    return found


def tables(rows: list[Row], about: dict[str, Any]) -> str:
    """Markdown: medians over the turns of throughput, inter-token time, time to first token; start, memory."""
    labels = list(dict.fromkeys(row["workload"] for row in rows))
    names = list(dict.fromkeys(row["peer"] for row in rows))

    def median(name: str, label: str, figure: Any) -> str:
        values = [figure(row) for row in rows if row["peer"] == name and row["workload"] == label]
        return f"{statistics.median(values):.4g}" if values else "-"

    def table(title: str, figure: Any) -> list[str]:
        head = [f"| {title} | " + " | ".join(labels) + " |", "|---" * (len(labels) + 1) + "|"]
        body = [f"| {name} | " + " | ".join(median(name, label, figure) for label in labels) + " |" for name in names]
        return [*head, *body]

    lines = table("output tokens/s", lambda row: row["output_tokens_per_s"])
    compared = {label: ratios(rows, label) for label in labels}
    if any(compared.values()):
        cells = [
            f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})" if found else "-"
            for found in compared.values()
        ]
        lines.append(f"| **{OURS} / best peer** | " + " | ".join(cells) + " |")
    lines += ["", *table("inter-token time, mean, ms", lambda row: 1000 * row["itl_s"]["mean"])]
    lines += ["", *table("time to first token, median, ms", lambda row: 1000 * row["ttft_s"]["p50"])]
    lines += ["", *table("CPU seconds of the server per 1,000 output tokens", _cpu_per_1000)]
    lines += ["", "| server | version | start, s | memory, MiB | CPU while idle |", "|---|---|---|---|---|"]
    for name in names:
        rss = max(row["server_rss_bytes"] for row in rows if row["peer"] == name) / 2**20
        facts = about[name]
        start_s, idle = facts.get("start_s"), facts.get("idle_share")
        if start_s is not None and idle is not None:
            lines.append(f"| {name} | {facts['version']} | {start_s:.1f} | {rss:.0f} | {idle:.1%} |")
    lines += [f"\nleft out: {name}: {facts['left_out']}" for name, facts in about.items() if "left_out" in facts]
    return "\n".join(lines)


def _cpu_per_1000(row: Row) -> float:
    return 1000 * float(row["server_cpu_s"]) / int(row["output_tokens"])


def write(arguments: argparse.Namespace, rows: list[Row], text: str, facts: dict[str, Any]) -> None:
    """Rows and what they were measured with as <name>.json, `text` as <name>.md, in RESULTS. `facts`: of this run."""
    about = {
        "date": str(datetime.date.today()),
        "machine": machine.about(),
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        **facts,
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{arguments.name}.json"
    file.write_text(json.dumps({"about": about, "rows": rows}, indent=1), encoding="utf-8")
    file.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nwritten to {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", nargs="*", default=[peer.name for peer in peers.DEFAULT], choices=list(peers.ALL))
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--model", type=Path, help="model folder; default: the demo model")
    parser.add_argument("--dtype", default=machine.fast_dtype(), help="default: what this CPU multiplies fastest")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default=str(datetime.date.today()), help="of the files in benchmarks/results")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the servers are stopped too
    if arguments.model is None:
        from builder.demo_model import ensure

        arguments.model = ensure(print)
    comparison = Comparison(arguments.model, dtype=arguments.dtype, threads=arguments.threads)
    try:
        compare(arguments.peers, arguments.workloads, arguments.repeats, comparison)
    except KeyboardInterrupt:
        print("stopped; this is what was measured until now")
    facts = {"repeats": arguments.repeats, "servers": comparison.about}
    write(arguments, comparison.rows, tables(comparison.rows, comparison.about), facts)


if __name__ == "__main__":
    main()
