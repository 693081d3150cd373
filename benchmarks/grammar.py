"""What constraints cost a step.

    python -m benchmarks.grammar [--model DIR] [--batch 32] [--json FILE] [--limit RATIO]

First the parts, for a batch of sequences under a usual JSON schema, each at a place of its own, in milliseconds a step:

    masks     all rows, from the matchers (fill_rows)
    accept    all rows, the drawn token
    apply     the masks on the logits

Then the whole: the time of a decode step of the real engine with all rows constrained, over the same with none. Both
draw at temperature 1 and go on for as many tokens. `--limit` makes the exit code 1 if the ratio is above it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from engine import adjust
from engine.core import EngineCore
from engine.grammar import GrammarCompiler, fill_rows
from engine.messages import Command, EngineConfig, GrammarSpec, Request, SamplingParams
from engine.runner import Runner

TEXT = {"type": "string", "minLength": 60}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "company", "other"]},
        "tags": {"type": "array", "items": TEXT, "minItems": 3},
        "address": {"type": "object", "properties": {"street": TEXT, "city": TEXT}, "required": ["street", "city"]},
    },
    "required": ["name", "age", "kind", "tags", "address"],
    "additionalProperties": False,
}
SPEC = GrammarSpec("json_schema", json.dumps(SCHEMA))
STEPS = 48


def quartile(seconds: list[float]) -> float:
    """Milliseconds; the lower quartile, since other processes of a shared machine only ever add."""
    return 1000 * statistics.quantiles(seconds)[0]


def parts(model: Path, batch: int, vocab_size: int) -> dict[str, float]:
    compiler = GrammarCompiler(model, vocab_size)
    grammars = [compiler.compile(SPEC) for _ in range(batch)]
    random = np.random.default_rng(0)
    mask = np.zeros((batch, -(-vocab_size // 32)), dtype=np.int32)
    logits = torch.rand(batch, vocab_size)
    seconds: dict[str, list[float]] = {"masks": [], "accept": [], "apply": []}
    for step in range(4 * STEPS):
        start = perf_counter()
        fill_rows(list(enumerate(grammars)), mask)
        filled = perf_counter()
        adjust._forbid(logits, list(range(batch)), mask)
        applied = perf_counter()
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
        drawn = [int(random.choice(np.flatnonzero(row))) for row in bits]
        before = perf_counter()
        for row, token in enumerate(drawn):
            if not grammars[row].accept(token) or grammars[row].done or step % (batch + 1) == row:
                grammars[row] = compiler.compile(SPEC)
        seconds["masks"].append(filled - start)
        seconds["apply"].append(applied - filled)
        seconds["accept"].append(perf_counter() - before)
    return {name: quartile(values[STEPS:]) for name, values in seconds.items()}


def decode_ms(runner: Runner, config: EngineConfig, compiler: GrammarCompiler, grammar: GrammarSpec | None) -> float:
    """A step of decoding `max_num_seqs` sequences."""
    params = SamplingParams(max_tokens=STEPS + 4, seed=1)
    inbox: list[Command] = [
        Request(f"r{index}", tuple(range(100 + index, 132 + index)), params, grammar=grammar)
        for index in range(config.max_num_seqs)
    ]

    def receive() -> list[Command]:
        commands = inbox[:]
        inbox.clear()
        return commands

    core = EngineCore(config, runner, compiler.submit, receive)
    while core.stats().num_running < config.max_num_seqs or core.stats().generation_tokens < config.max_num_seqs:
        core.step()
    seconds = []
    while core.stats().num_running == config.max_num_seqs and len(seconds) < STEPS:
        start = perf_counter()
        core.step()
        seconds.append(perf_counter() - start)
    while core.has_work:
        core.step()
    return quartile(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model; the demo model by default")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison; the lowest of each side counts")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--limit", type=float, help="the highest ratio that is fine")
    options = parser.parse_args()
    if options.model is None:
        from builder.demo_model import ensure

        options.model = ensure()
    config = EngineConfig(str(options.model), dtype="float32", max_num_seqs=options.batch, enable_prefix_caching=False)
    runner = Runner(config)
    figures = parts(options.model, options.batch, runner.info.vocab_size)
    for name, value in figures.items():
        print(f"{name:12} {value:8.2f} ms", flush=True)
    compiler = GrammarCompiler(options.model, runner.info.vocab_size)
    free, constrained = [], []
    for _ in range(options.rounds):
        free.append(decode_ms(runner, config, compiler, None))
        constrained.append(decode_ms(runner, config, compiler, SPEC))
    figures |= {"step_free": min(free), "step_constrained": min(constrained)}
    ratio = figures["ratio"] = figures["step_constrained"] / figures["step_free"]
    print(f"{'free step':12} {figures['step_free']:8.2f} ms\n{'constrained':12} {figures['step_constrained']:8.2f} ms")
    print(f"{'ratio':12} {ratio:8.2f}")
    if options.json:
        options.json.write_text(json.dumps({"batch": options.batch, **figures}, indent=1))
    if options.limit is not None and ratio > options.limit:
        sys.exit(f"a constrained step takes {ratio:.2f} times a free one, more than {options.limit}")


if __name__ == "__main__":
    main()
