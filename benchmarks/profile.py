"""Where the time of a step goes (CPU).

    python -m benchmarks.profile [--batch 1 8 32] [--context 192] [--tokens 1] [--quantization int8] [--threads 2]

For each batch size and context a step of that many sequences is taken apart, and every part is run on its own, all
layers in turn, so that weights and pages come from memory as they do in a step. By default a decode step at 192 tokens
of context; `--context 127 --tokens 127` is the prefill of a prompt. Milliseconds, the lowest of some repeats:

    build       plan -> arrays (Python, numpy)
    gemms       the linear layers of all decoder layers, by name
    attention   over pages, with the writing of keys and values
    small       norms, rotary embedding, SwiGLU
    head        hidden states -> logits
    sample      adjusting, drawing, the tokens as Python numbers: step less build, forward and head
    rest        of the forward, what gemms, attention and small do not explain (less than 0: they run better together)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from engine.threads import before_torch

before_torch()  # as the engine process does

import torch  # noqa: E402

from engine import batch as batches  # noqa: E402
from engine.fuse import FusedBody, FusedLayer  # noqa: E402
from engine.messages import EngineConfig, Request, SamplingParams  # noqa: E402
from engine.runner import Runner  # noqa: E402
from engine.scheduler import Part, Plan  # noqa: E402
from engine.sequence import Sequence  # noqa: E402

_PAGE_SIZE = 16


def lowest_ms(run: Callable[[], object], repeats: int = 24) -> float:
    """The lowest: other processes of a shared machine only ever add."""
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        run()
        seconds.append(perf_counter() - start)
    return 1000 * min(seconds)


def make_plan(runner: Runner, size: int, context: int, tokens: int) -> Plan:
    """A step that computes the last `tokens` of `context` tokens of `size` sequences, in pages of their own."""
    pages_each = -(-context // runner.pool.page_size)
    parts = []
    for index in range(size):
        ids = tuple((index * 7919 + token * 104729) % runner.info.vocab_size for token in range(context))
        seq = Sequence(Request(f"r{index}", ids, SamplingParams(max_tokens=1, temperature=0.0)), index, seed=0)
        seq.pages = list(range(index * pages_each, (index + 1) * pages_each))
        parts.append(Part(seq, context - tokens, tokens, samples=True))
    return Plan(tuple(parts), size * tokens)


@torch.inference_mode()
def profile(runner: Runner, size: int, context: int, tokens: int) -> dict[str, float]:
    """Milliseconds by part; `step` is the whole."""
    body, plan = runner.model.body, make_plan(runner, size, context, tokens)
    layers = body.layers if isinstance(body, FusedBody) else []
    if not layers or not all(isinstance(layer, FusedLayer) and layer.mlp is None for layer in layers):
        raise SystemExit("only models whose layers are all fused can be taken apart")
    step = batches.build(plan, runner.backend, runner.pool)
    shared = body.step(step.positions, step)
    ops, spec = layers[0].ops, layers[0].spec
    hidden = torch.randn(plan.num_tokens, runner.model.config.hidden_size, dtype=runner.model.dtype)
    qkv, gate_up = layers[0].qkv(hidden), layers[0].gate_up(hidden)
    inner = ops.silu_mul(gate_up)
    attended = torch.randn(plan.num_tokens, spec.num_heads * spec.value_dim, dtype=hidden.dtype)
    query, key, value = ops.rotate(qkv.clone(), spec.num_heads, spec.num_kv_heads, shared.cos, shared.sin, None)

    def each(run: Callable[[FusedLayer], object]) -> Callable[[], None]:
        def all_layers() -> None:
            for layer in layers:
                run(layer)

        return all_layers

    def small(layer: FusedLayer) -> None:
        ops.rms_norm(hidden, layer.input_norm, layer.eps)
        ops.rms_norm(hidden, layer.post_norm, layer.eps)
        ops.rotate(qkv, spec.num_heads, spec.num_kv_heads, shared.cos, shared.sin, None)
        ops.silu_mul(gate_up)

    parts = {
        "build": lambda: batches.build(plan, runner.backend, runner.pool),
        "gemm qkv": each(lambda layer: layer.qkv(hidden)),
        "gemm out": each(lambda layer: layer.out.add_to(hidden, attended)),
        "gemm gate_up": each(lambda layer: layer.gate_up(hidden)),
        "gemm down": each(lambda layer: layer.down.add_to(hidden, inner)),
        "attention": each(lambda layer: step.attend(layer.index, spec, query, key, value, None)),
        "small": each(small),
        "head": lambda: runner.model.logits(hidden[:size]),
    }
    parts["gemms"] = each(
        lambda layer: (layer.qkv(hidden), layer.out.add_to(hidden, attended), layer.gate_up(hidden),
                       layer.down.add_to(hidden, inner))
    )  # fmt: skip
    milliseconds = {name: lowest_ms(run) for name, run in parts.items()}
    milliseconds["forward"] = lowest_ms(lambda: runner.model.hidden(step.token_ids, step.positions, step))
    milliseconds["step"] = lowest_ms(lambda: runner.collect(runner.launch(plan)))
    milliseconds["sample"] = max(0.0, milliseconds["step"] - sum(milliseconds[x] for x in ("build", "forward", "head")))
    explained = sum(milliseconds[x] for x in ("gemms", "attention", "small"))
    milliseconds["rest"] = milliseconds["forward"] - explained
    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model; the demo model by default")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="*", default=[192])
    parser.add_argument("--tokens", type=int, default=1, help="of each sequence that the step computes: 1 = decode")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--threads", type=int, help="default: one a core")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.model is None:
        from builder.demo_model import ensure

        options.model = ensure()
    runner = Runner(
        EngineConfig(
            str(options.model),
            dtype=options.dtype,
            quantization=options.quantization,
            num_threads=options.threads,
            max_num_seqs=max(options.batch),
            num_pages=max(options.batch) * -(-max(options.context) // _PAGE_SIZE),
            page_size=_PAGE_SIZE,
        )
    )
    steps = [(size, context) for size in options.batch for context in options.context]
    found = [profile(runner, size, context, options.tokens) for size, context in steps]
    print(f"{'batch':14}" + "".join(f"{size:>9}" for size, _ in steps))
    print(f"{'context':14}" + "".join(f"{context:>9}" for _, context in steps))
    for name in found[0]:
        print(f"{name:14}" + "".join(f"{milliseconds[name]:9.2f}" for milliseconds in found))
    if options.json:
        figures = [
            {"batch": size, "context": context, "tokens": options.tokens, "ms": milliseconds}
            for (size, context), milliseconds in zip(steps, found, strict=True)
        ]
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
