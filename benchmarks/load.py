"""The load generator: streamed OpenAI completions against any server, timed at the client.

    python -m benchmarks.load --base-url http://127.0.0.1:8000/v1 --concurrency 8 --requests 32

What is measured, per request: time to first token (TTFT, s), time per further token (ITL, s: last minus first
token's arrival, over their count, since servers may send several tokens in one event), total time; over the run:
output tokens a second and percentiles. Token counts come from the server's own usage chunk; a run whose counts are
not what was asked for is an error, not a result.

Each request takes a fresh connection, because one of the peers mishandles reused ones and all must be treated alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe qui ro su ta ve wi xo yu za".split()


@dataclass(frozen=True)
class Workload:
    concurrency: int = 8
    requests: int = 32
    prompt_tokens: int = 127
    output_tokens: int = 64
    shared_prefix_tokens: int = 0  # of the prompt, the first so many are the same for all requests
    rate: float | None = None  # requests a second, Poisson; None = as fast as the concurrency allows


# What every comparison runs, over HTTP and engines alone.
WORKLOADS = {
    "1 stream": Workload(concurrency=1, requests=4),
    "8 streams": Workload(concurrency=8, requests=16),
    "32 streams": Workload(concurrency=32, requests=64),
    "shared prefix": Workload(
        concurrency=8, requests=16, prompt_tokens=640, shared_prefix_tokens=512, output_tokens=32
    ),
}


@dataclass
class Timing:
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    events: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def itl_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.output_tokens - 1)


@dataclass
class Result:
    workload: Workload
    seconds: float
    output_tokens_per_s: float
    ttft_s: dict[str, float]
    itl_s: dict[str, float]
    prompt_tokens: int
    output_tokens: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class LoadError(RuntimeError):
    """A request failed, or the server made another number of tokens than was asked for."""


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * share))]
        for name, share in (("p50", 0.50), ("p95", 0.95), ("p99", 0.99))
    }
    return {"mean": sum(ordered) / len(ordered), **at}


def prompts(tokenizer: Tokenizer, workload: Workload, seed: int | str) -> Iterator[str]:
    """Texts of exactly `prompt_tokens` tokens, all different after the shared prefix."""
    shared = prompt_text(tokenizer, random.Random("shared"), workload.shared_prefix_tokens)
    rng = random.Random(seed)
    for _ in range(workload.requests):
        yield prompt_text(tokenizer, rng, workload.prompt_tokens, start=shared)


def token_prompts(workload: Workload, vocab_size: int, seed: int | str) -> list[list[int]]:
    """As `prompts`, as token ids, for engines that take these."""
    source = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [source.randrange(100, vocab_size) for _ in range(count)]

    shared = draw(workload.shared_prefix_tokens)
    return [shared + draw(workload.prompt_tokens - len(shared)) for _ in range(workload.requests)]


def prompt_text(tokenizer: Tokenizer, rng: random.Random, num_tokens: int, start: str = "") -> str:
    """`start` plus random words, to exactly `num_tokens` tokens."""
    text = start
    while (count := len(tokenizer.encode(text, add_special_tokens=False).ids)) < num_tokens:
        word = "".join(rng.choice(SYLLABLES) for _ in range(rng.randrange(1, 4)))
        longer = f"{text} {word}" if num_tokens - count > 6 else f"{text} a"
        text = longer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) != num_tokens:
        raise LoadError(f"could not build a prompt of {num_tokens} tokens")
    return text


async def run(
    base_url: str,
    model: str,
    texts: list[str],
    workload: Workload,
    *,
    extra_body: dict[str, Any] | None = None,
) -> Result:
    """Sends all `texts`; raises LoadError if any request fails or has the wrong length.

    `extra_body` is what makes this server go on to the full length, `ignore_eos` unless another is given.
    """
    body = {
        "model": model,
        "max_tokens": workload.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if extra_body is None else extra_body),
    }
    gate = asyncio.Semaphore(workload.concurrency)
    rng = random.Random(5)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def one(text: str, delay_s: float) -> Timing:
            await asyncio.sleep(delay_s)
            async with gate:
                try:
                    return await _stream(session, f"{base_url}/completions", {**body, "prompt": text}, workload)
                except aiohttp.ClientError as error:
                    raise LoadError(f"the connection broke: {error}") from None

        started, delay_s, tasks = time.perf_counter(), 0.0, []
        for text in texts:
            tasks.append(asyncio.create_task(one(text, delay_s)))
            delay_s += rng.expovariate(workload.rate) if workload.rate else 0.0
        timings = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - started
    output_tokens = sum(timing.output_tokens for timing in timings)
    return Result(
        workload=workload,
        seconds=seconds,
        output_tokens_per_s=output_tokens / seconds,
        ttft_s=percentiles([timing.ttft_s for timing in timings]),
        itl_s=percentiles([timing.itl_s for timing in timings]),
        prompt_tokens=sum(timing.prompt_tokens for timing in timings),
        output_tokens=output_tokens,
    )


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], workload: Workload) -> Timing:
    timing = Timing(sent_s=time.perf_counter())
    usage: dict[str, Any] = {}
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise LoadError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event.get("error"):
                raise LoadError(f"the stream ended with {event['error']}")
            if any(choice.get("text") for choice in event.get("choices", ())):
                now = time.perf_counter()
                timing.first_s = timing.first_s or now
                timing.last_s = now
                timing.events += 1
    timing.prompt_tokens = usage.get("prompt_tokens", 0)
    timing.output_tokens = usage.get("completion_tokens", timing.events)
    for kind, got, asked in (
        ("prompt", timing.prompt_tokens, workload.prompt_tokens),
        ("output", timing.output_tokens, workload.output_tokens),
    ):
        if got != asked:
            raise LoadError(f"{got} {kind} tokens where {asked} were asked for")
    return timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json that counts the prompt")
    for name, default in asdict(Workload()).items():
        kind = float if name == "rate" else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    arguments = vars(parser.parse_args())
    workload = Workload(**{name: arguments[name] for name in asdict(Workload())})
    texts = list(prompts(Tokenizer.from_file(str(arguments["tokenizer"])), workload, seed=time.time_ns()))
    result = asyncio.run(run(arguments["base_url"], arguments["model"], texts, workload))
    print(json.dumps(result.as_json(), indent=2))


if __name__ == "__main__":
    main()
