"""What the prefix cache saves: the same 2,000-token prefix sent twice, time to first token of each.

    python -m benchmarks.prefix --base-url http://127.0.0.1:8000/v1 --tokenizer <model folder>/tokenizer.json

Expected: the second answer computes only the last few tokens of its prompt, so its time to first token falls to that
of a short prompt. Prints one line a repeat (a fresh prefix each) and the median ratio; writes JSON when asked.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from openai import OpenAI
from tokenizers import Tokenizer

from benchmarks.load import prompt_text


def first_token(client: OpenAI, model: str, prompt: str) -> tuple[float, int]:
    """(seconds to the first text, prompt tokens that came from the cache)."""
    begun, first_s, cached = time.perf_counter(), 0.0, 0
    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=4, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.choices and not first_s:
            first_s = time.perf_counter() - begun
        if chunk.usage and chunk.usage.prompt_tokens_details:
            cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return first_s, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    client = OpenAI(base_url=arguments.base_url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    rows: list[dict[str, Any]] = []
    for _ in range(arguments.repeats):
        rng = random.Random(time.time_ns())
        prefix = prompt_text(tokenizer, rng, arguments.prefix_tokens)
        first_s, first_cached = first_token(client, model, prefix + " one")
        second_s, second_cached = first_token(client, model, prefix + " two")
        rows.append({"first_s": first_s, "second_s": second_s, "ratio": second_s / first_s, "cached": second_cached})
        print(f"first {first_s:.3f} s ({first_cached} cached)   second {second_s:.3f} s ({second_cached} cached)")
    ratio = statistics.median(row["ratio"] for row in rows)
    print(f"the second takes {ratio:.1%} of the first's time to first token (median of {arguments.repeats})")
    if arguments.json:
        arguments.json.write_text(json.dumps({"prefix_tokens": arguments.prefix_tokens, "repeats": rows}, indent=2))


if __name__ == "__main__":
    main()
