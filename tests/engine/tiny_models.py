"""Tiny random models of many families, saved as ordinary Hugging Face folders, and a driver for a bare Runner."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.messages import EngineConfig, Request, SamplingParams
from engine.runner import Runner
from engine.scheduler import Part, Plan
from engine.sequence import Sampled, Sequence

VOCAB = 301  # no multiple of anything

_COMMON = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", dict(tie_word_embeddings=True)),
    "llama-bias": ("llama", dict(attention_bias=True, mlp_bias=True, num_key_value_heads=6)),
    "llama3-rope": ("llama", dict(max_position_embeddings=1024, rope_parameters=dict(
        rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64))),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "qwen3-moe": ("qwen3_moe", dict(head_dim=16, **_MOE)),
    "mistral": ("mistral", dict(head_dim=8, sliding_window=None)),
    "mistral-window": ("mistral", dict(head_dim=8, sliding_window=21)),
    "gemma2": ("gemma2", dict(head_dim=16, sliding_window=19, layer_types=_MIXED, query_pre_attn_scalar=12,
                              attn_logit_softcapping=5.0, final_logit_softcapping=3.0)),
    "gemma3": ("gemma3_text", dict(head_dim=16, sliding_window=17, layer_types=_MIXED, query_pre_attn_scalar=16)),
    "phi": ("phi", dict(num_key_value_heads=6)),
    "phi3": ("phi3", dict(sliding_window=None)),
    "phi3-window": ("phi3", dict(sliding_window=23)),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", dict(ffn_dim=80, word_embed_proj_dim=48)),
    "gpt-oss": ("gpt_oss", dict(head_dim=16, sliding_window=20, num_local_experts=4, num_experts_per_tok=2,
                                layer_types=_MIXED)),
    "granite": ("granite", dict(logits_scaling=3.0, residual_multiplier=0.5, attention_multiplier=0.2,
                                embedding_multiplier=2.0)),
    "cohere": ("cohere", dict(logit_scale=0.3)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0, 1], layer_types=["full_attention"] * 3)),
    "olmo2": ("olmo2", {}),
}  # fmt: skip


def config_of(family: str):
    model_type, extra = FAMILIES[family]
    return CONFIG_MAPPING[model_type](**{**_COMMON, **extra})


def make(family: str, folder: Path) -> Path:
    """A random model of the family, saved in `folder`. Weights are large, so that no two logits are close."""
    config = config_of(family)
    torch.manual_seed(sum(map(ord, family)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif "norm" not in name:
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy output of transformers' own generate, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    outputs = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def random_prompts(lengths: list[int], vocab_size: int = VOCAB, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab_size) for _ in range(length)] for length in lengths]


def runner_of(folder: Path, **config) -> Runner:
    defaults = {"dtype": "float32", "num_pages": 200, "device": "cpu", "num_threads": 1}
    return Runner(EngineConfig(str(folder), **{**defaults, **config}))


class Driver:
    """Runs sequences on a Runner as a scheduler would, with pages in random order."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self.runner = runner
        self.free = list(range(runner.info.num_pages))
        random.Random(seed).shuffle(self.free)
        self.sampled: list[Sampled] = []
        self.max_batch = 0

    def sequence(self, prompt: list[int], seed: int = 0, choice: int = 0, grammar=None, **params) -> Sequence:
        params = {"max_tokens": 8, "temperature": 0.0, **params}
        return Sequence(Request("r", tuple(prompt), SamplingParams(**params), choice=choice), 0, seed, grammar)

    def step(self, seqs: list[Sequence], chunk: int) -> list[Sampled]:
        parts = []
        for seq in seqs:
            count = min(chunk, seq.num_tokens - seq.num_computed)
            while len(seq.pages) * self.runner.info.page_size < seq.num_tokens:
                seq.pages.append(self.free.pop())
            samples = seq.num_computed + count == seq.num_tokens and seq.params.max_tokens > 0
            parts.append(Part(seq, seq.num_computed, count, samples))
        self.max_batch = max(self.max_batch, len(parts))
        results = self.runner.collect(self.runner.launch(Plan(tuple(parts), sum(part.count for part in parts))))
        for part in parts:
            part.seq.num_computed += part.count
        for result in results:
            result.seq.token_ids += result.token_ids
            result.seq.prompt_logprobs += result.prompt_logprobs or []
        self.sampled += results
        return results

    def run(self, seqs: list[Sequence], chunk: int = 10_000) -> list[list[int]]:
        """Until all have max_tokens; -> the outputs."""
        while open_seqs := [
            seq for seq in seqs
            if seq.num_output < seq.params.max_tokens or seq.num_computed < seq.num_prompt
        ]:  # fmt: skip
            self.step(open_seqs, chunk)
        return [seq.output_ids for seq in seqs]
