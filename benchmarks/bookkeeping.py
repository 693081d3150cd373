"""What the engine's bookkeeping costs a step, without a model.

    python -m benchmarks.bookkeeping [--json FILE]

The real EngineCore with a runner that answers at once, so that all time measured is Python's own: what a GPU would
have to wait for between two steps. Per case, the lower quartile over the steps of decoding a full batch, in
milliseconds (other processes of a shared machine only ever add):

    plan      Scheduler.plan
    commit    append, register full pages, decide the end, build the message
    encode    pickle the message of the step (engine process)
    deliver   unpickle it and hand each token to its stream (worker process)
    per 100   plan + commit for 100 sequences

Cases: batches of 1, 100 and 1,000 sequences in a pool of 100,000 pages of 16 tokens; the largest again with 10,000
requests waiting, which must cost nothing, and with prefixes of 4,000 tokens, since a step may not depend on the
context either. `admit` is the whole step (ms) that admits the batch: prefix lookup, pages, the first token.
`--limit MS` makes the exit code 1 if `per 100` of a large batch is above it.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import sys
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

from engine.core import EngineCore
from engine.grammar import Grammar
from engine.messages import Command, EngineConfig, GrammarSpec, Request, SamplingParams
from engine.scheduler import Plan
from engine.sequence import Sampled, Sequence
from engine.stream import RequestStream, deliver

NUM_PAGES = 100_000
STEPS = 64  # a multiple of the page size: page borders are crossed as often as they really are


@dataclass
class Case:
    running: int
    waiting: int = 0
    prompt_tokens: int = 64
    shared_tokens: int = 0  # of the prompt, the first so many are the same for all


@dataclass
class Cost:
    """Milliseconds; lower quartiles, but `admit`."""

    plan: float
    commit: float
    encode: float
    deliver: float
    per_100: float
    admit: float


@dataclass
class Info:
    num_pages: int = NUM_PAGES
    page_size: int = 16
    vocab_size: int = 50_000
    max_model_len: int = 10_000
    device: str = "none"
    dtype: str = "none"
    attention_backend: str = "none"
    load_s: dict[str, float] = field(default_factory=dict)


class InstantRunner:
    info = Info()

    def launch(self, plan: Plan) -> Plan:
        return plan

    def collect(self, plan: Plan) -> list[Sampled]:
        return [Sampled(part.seq, [7]) for part in plan.parts if part.samples]

    def forget(self, seq: Sequence) -> None:
        pass


def no_grammar(spec: GrammarSpec) -> Future[Grammar]:
    raise NotImplementedError


def requests(case: Case) -> list[Command]:
    shared = list(range(case.shared_tokens))
    own = case.prompt_tokens - case.shared_tokens
    return [
        Request(
            f"chatcmpl-{index:032x}",
            (*shared, *((index * 131 + k * 17) % 50_000 for k in range(own))),
            SamplingParams(max_tokens=4 * STEPS, stop_token_ids=frozenset({0, 1, 2})),
        )
        for index in range(case.running + case.waiting)
    ]


def measure(case: Case) -> Cost:
    inbox = requests(case)

    def receive() -> list[Command]:
        commands = inbox[:]
        inbox.clear()
        return commands

    config = EngineConfig(
        "none",
        max_num_seqs=case.running,
        max_num_batched_tokens=10**9,
        max_num_queued=10**6,
    )
    core = EngineCore(config, InstantRunner(), no_grammar, receive)
    streams = {command.id: RequestStream(command.id) for command in inbox if isinstance(command, Request)}
    start = perf_counter()
    while len(core.scheduler.running) < case.running:  # two steps where a prefix is shared: one leads
        core.step()
    admit_s = perf_counter() - start

    seconds: dict[str, list[float]] = {"plan": [], "commit": [], "encode": [], "deliver": []}
    for _ in range(STEPS):
        before = core.stats().step_s
        (message,) = core.step()
        after = core.stats().step_s
        marks = [perf_counter()]
        frame = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        marks.append(perf_counter())
        deliver(pickle.loads(frame), streams)
        marks.append(perf_counter())
        seconds["plan"].append(after["plan"] - before["plan"])
        seconds["commit"].append(after["commit"] - before["commit"])
        seconds["encode"].append(marks[1] - marks[0])
        seconds["deliver"].append(marks[2] - marks[1])
    assert len(core.scheduler.running) == case.running and core.scheduler.num_waiting == case.waiting
    ms = {name: 1000 * statistics.quantiles(values)[0] for name, values in seconds.items()}
    return Cost(**ms, per_100=(ms["plan"] + ms["commit"]) * 100 / case.running, admit=1000 * admit_s)


CASES = [
    Case(running=1),
    Case(running=100),
    Case(running=1000),
    Case(running=1000, waiting=10_000),
    Case(running=1000, prompt_tokens=4100, shared_tokens=4000),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--limit", type=float, help="milliseconds that plan + commit may take for 100 sequences")
    options = parser.parse_args()
    columns = list(Cost.__annotations__)
    print("running waiting prompt shared" + "".join(f"{name:>10}" for name in columns) + "   (ms)")
    results = []
    for case in CASES:
        cost = measure(case)
        results.append({"case": asdict(case), "ms": asdict(cost)})
        figures = "".join(f"{value:10.3f}" for value in asdict(cost).values())
        print(f"{case.running:7} {case.waiting:7} {case.prompt_tokens:6} {case.shared_tokens:6}{figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    worst = max(result["ms"]["per_100"] for result in results if result["case"]["running"] >= 100)
    if options.limit is not None and worst > options.limit:
        sys.exit(f"plan + commit take {worst:.2f} ms for 100 sequences, more than {options.limit}")


if __name__ == "__main__":
    main()
