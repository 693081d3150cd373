"""The engine alone: token ids in, token ids out, in this process. No worker, no HTTP, no text.

    python -m benchmarks.engine [--model DIR] [--dtype auto] [--quantization int8] [--threads 2] [--repeats 3]

The workloads of the side-by-side runs (benchmarks.load.WORKLOADS). Printed per workload: output tokens a second
(medians over the repeats), the time of a step that only decodes (ms, lower quartile), and the share of the step that
is not the model's forward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from engine.threads import before_torch

before_torch()  # as the engine process does

from benchmarks.load import WORKLOADS, Workload, token_prompts  # noqa: E402
from engine.core import EngineCore  # noqa: E402
from engine.grammar import GrammarCompiler  # noqa: E402
from engine.messages import Command, EngineConfig, Request, SamplingParams  # noqa: E402
from engine.runner import Runner  # noqa: E402

FORWARD = ("launch", "collect")  # the phases of a step in which the model runs


@dataclass
class Result:
    output_tokens_per_s: float
    decode_ms: float
    other_share: float  # of the time of all steps: planning, committing, building messages


def measure(runner: Runner, config: EngineConfig, workload: Workload, seed: int) -> Result:
    """A closed loop: whenever a request ends, the next one is sent. Raises AssertionError if a token is missing."""
    waiting: list[Command] = [
        Request(f"r{index}", tuple(ids), SamplingParams(temperature=0.0, max_tokens=workload.output_tokens))
        for index, ids in enumerate(token_prompts(workload, runner.info.vocab_size, seed))
    ]
    open_requests = 0

    def receive() -> list[Command]:
        nonlocal open_requests
        commands = [waiting.pop() for _ in range(min(len(waiting), workload.concurrency - open_requests))]
        open_requests += len(commands)
        return commands

    compiler = GrammarCompiler(config.model_path, runner.info.vocab_size)
    core = EngineCore(config, runner, compiler.submit, receive)
    decode_s: list[float] = []
    total = workload.requests * workload.output_tokens
    before = core.stats()
    start = perf_counter()
    while before.generation_tokens < total:
        begin = perf_counter()
        messages = core.step()
        elapsed = perf_counter() - begin
        for message in messages:
            open_requests -= sum(output.finish is not None for output in getattr(message, "outputs", ()))
        after = core.stats()
        if after.generation_tokens - before.generation_tokens == workload.concurrency == after.num_running and (
            after.prompt_tokens == before.prompt_tokens
        ):
            decode_s.append(elapsed)
        before = after
    seconds = perf_counter() - start
    assert before.generation_tokens == total
    steps = before.step_s
    return Result(
        output_tokens_per_s=total / seconds,
        decode_ms=1000 * statistics.quantiles(decode_s)[0],
        other_share=1 - sum(steps[name] for name in FORWARD) / seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model; the demo model by default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--threads", type=int, help="default: one a core")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.model is None:
        from builder.demo_model import ensure

        options.model = ensure()
    config = EngineConfig(
        str(options.model),
        dtype=options.dtype,
        quantization=options.quantization,
        num_threads=options.threads,
        max_num_seqs=32,
        max_num_batched_tokens=256,  # as the worker sets it for a CPU
    )
    runner = Runner(config)
    info = runner.info
    print(f"{info.dtype} {options.quantization or ''} {info.attention_backend}, pid {os.getpid()}", flush=True)
    results: dict[str, list[Result]] = {name: [] for name in options.workloads}
    for repeat in range(options.repeats):
        for name in options.workloads:
            results[name].append(measure(runner, config, WORKLOADS[name], seed=repeat))
    for name, found in results.items():
        speed = statistics.median(each.output_tokens_per_s for each in found)
        decode, other = min(each.decode_ms for each in found), statistics.median(each.other_share for each in found)
        print(f"{name:14} {speed:8.1f} tokens/s   decode step {decode:7.2f} ms   not the model {other:6.1%}")
    if options.json:
        options.json.write_text(json.dumps({name: [asdict(x) for x in found] for name, found in results.items()}))


if __name__ == "__main__":
    main()
