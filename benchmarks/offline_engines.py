"""Engines without a server, run by benchmarks.offline_peers with the Python of each peer's own environment.

Reads one JSON object from standard input: {"engine", "model", "gguf", "dtype", "threads", "workloads": {name:
{"concurrency", "output_tokens", "prompts": [[token id, ...], ...]}}}. Prints one JSON object as its last line:
{"version", "workloads": {name: {"seconds", "output_tokens"}}}. Imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int, int], int]  # (prompts, concurrency, output tokens each) -> tokens made


def transformers_generate(task: dict[str, Any]) -> tuple[str, Generate]:
    """Static batches: `concurrency` prompts of one length at a time, no padding, nothing shared between them."""
    import torch
    import transformers

    torch.set_num_threads(task["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(task["model"], dtype=getattr(torch, task["dtype"])).eval()

    def generate(prompts: list[list[int]], concurrency: int, output_tokens: int) -> int:
        made = 0
        for start in range(0, len(prompts), concurrency):
            batch = torch.tensor(prompts[start : start + concurrency])
            out = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                do_sample=False,
            )
            made += (out.shape[1] - batch.shape[1]) * out.shape[0]
        return made

    return transformers.__version__, generate


def openvino_continuous_batching(task: dict[str, Any]) -> tuple[str, Generate]:
    """OpenVINO GenAI's continuous batching, with prefix cache, 2 GiB of pages, keys and values unquantized."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 32
    precision = {"float32": "f32", "bfloat16": "bf16"}[task["dtype"]]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": task["threads"],
    }
    pipeline = genai.ContinuousBatchingPipeline(task["gguf"], scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], concurrency: int, output_tokens: int) -> int:
        config = genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        waiting = list(enumerate(prompts))
        handles: list[Any] = []
        made = 0
        while waiting or handles:
            while waiting and len(handles) < concurrency:
                index, ids = waiting.pop()
                handles.append(pipeline.add_request(index, ov.Tensor(np.array([ids], dtype=np.int64)), config))
            pipeline.step()
            for handle in [handle for handle in handles if handle.get_status() != genai.GenerationStatus.RUNNING]:
                made += sum(len(output.generated_ids) for output in handle.read_all())
                handles.remove(handle)
        return made

    return genai.__version__, generate


ENGINES = {"transformers-generate": transformers_generate, "openvino-genai": openvino_continuous_batching}


def main() -> None:
    task = json.load(sys.stdin)
    version, generate = ENGINES[task["engine"]](task)
    found = {}
    for name, workload in task["workloads"].items():
        concurrency, prompts = workload["concurrency"], workload["prompts"]
        generate([ids[::-1] for ids in prompts[:concurrency]], concurrency, 4)  # warm-up: every shape, other prompts
        begun = time.perf_counter()
        made = generate(prompts, concurrency, workload["output_tokens"])
        found[name] = {"seconds": time.perf_counter() - begun, "output_tokens": made}
    print(json.dumps({"version": version, "workloads": found}))


if __name__ == "__main__":
    main()
