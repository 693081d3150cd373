"""The promise of the engine, seen from the client: batched, streamed and alone give the same tokens as `generate`.

Prompts go through the completions endpoint as token ids, so that both sides certainly read the same prompt.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

NUM_PROMPTS = 50
MAX_TOKENS = 12
STREAMS_AT_ONCE = 32
# Float sums differ in order between two right implementations; below this gap the best token is a tie.
TIE = 1e-4

WORDS = (
    "river stone lantern quiet engine paper winter orange 42 list(map(int, xs)) , . ; Über 你好 🦊 the of and "
    "because never 3.14 def return SELECT * FROM tea harbour seven"
).split(" ")


def make_prompts(encode: Any) -> list[list[int]]:
    """Token id prompts of 1 to about 900 tokens, all different, few of them long."""
    rng = random.Random(7)
    prompts = []
    for index in range(NUM_PROMPTS):
        length = max(1, round(900 ** (index / (NUM_PROMPTS - 1))))
        ids: list[int] = []
        while len(ids) < length:
            ids += encode(" ".join(rng.choice(WORDS) for _ in range(8)) + " ")
        prompts.append(ids[:length])
    return prompts


async def streamed(client: AsyncOpenAI, model: str, prompt: list[int]) -> list[int]:
    ids: list[int] = []
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            ids += (choice.model_extra or {}).get("token_ids") or []
    return ids


async def whole(client: AsyncOpenAI, model: str, prompt: list[int]) -> list[int]:
    answer = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    return list((answer.choices[0].model_extra or {})["token_ids"])


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Any:
    """prompt ids -> (token ids of transformers' greedy generate, function for the gap of the two best logits)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()

    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
        return out[0, len(prompt) :].tolist()

    def gap_after(ids: list[int]) -> float:
        with torch.inference_mode():
            best = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].topk(2).values
        return float(best[0] - best[1])

    return generate, gap_after


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_streams_that_share_steps_equal_lone_requests_and_generate(served: Any, reference: Any) -> None:
    from tokenizers import Tokenizer

    generate, gap_after = reference
    tokenizer = Tokenizer.from_file(str(served.model_dir / "tokenizer.json"))
    prompts = make_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    assert len({tuple(prompt) for prompt in prompts}) == NUM_PROMPTS

    async with AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=300) as client:
        model = (await client.models.list()).data[0].id
        batched = await asyncio.gather(*[streamed(client, model, prompt) for prompt in prompts[:STREAMS_AT_ONCE]])
        assert served.metric("worker_paged:max_batch_size") == STREAMS_AT_ONCE
        batched += await asyncio.gather(*[streamed(client, model, prompt) for prompt in prompts[STREAMS_AT_ONCE:]])
        alone = [await whole(client, model, prompt) for prompt in prompts]

    def parts_by_a_tie(prompt: list[int], one: list[int], other: list[int]) -> bool:
        common = 0
        while common < min(len(one), len(other)) and one[common] == other[common]:
            common += 1
        return gap_after(prompt + one[:common]) < TIE

    parted = []
    for index, prompt in enumerate(prompts):
        if batched[index] != alone[index]:
            assert parts_by_a_tie(prompt, batched[index], alone[index]), f"prompt {index}: batch and alone differ"
        expected = generate(prompt)
        if alone[index] != expected:
            assert parts_by_a_tie(prompt, expected, alone[index]), f"prompt {index}: differs from generate"
            parted.append(index)
    assert len(parted) <= 1, f"prompts {parted} part from generate, if only at ties"
