"""The memory of keys and values: one pool of equal pages, used by all layers under the same page ids.

    keys[layer]    [N + 1, Hkv, page_size, D]     the tokens of a head side by side, as batched matmuls want them, or
    values[layer]  [N + 1, Hkv, page_size, Dv]    [N + 1, page_size, Hkv, D] if the backend wants tokens first

Page N is a padding page: page tables are filled up with it, and nothing that is read from it counts.
Who owns which page is the scheduler's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import psutil
import torch
from torch import Tensor

from engine.attention.base import LayerSpec
from engine.messages import EngineConfig

# On a CPU the pool shares memory with everything else on the machine.
_CPU_SHARE = 0.25
_CPU_BYTES = 2 << 30
_CACHE_LINE = 64  # bytes: vectors that cross its border are read twice


class KVPool:
    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        tokens_first: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        self.padding_page = num_pages

        def pages(num_heads: int, dim: int) -> Tensor:
            shape = (page_size, num_heads) if tokens_first else (num_heads, page_size)
            return _zeros((num_pages + 1, *shape, dim), device, dtype)

        self.keys = [pages(spec.num_kv_heads, spec.head_dim) for spec in specs]
        self.values = [pages(spec.num_kv_heads, spec.value_dim) for spec in specs]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros, not empty: a masked score times the garbage of fresh memory could still be NaN.

    torch writes them. On a CPU they are asked of the system instead, which makes memory when it is first used: to
    write 2 GiB took a third of a cold start.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    first = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(shape)


def page_bytes(specs: Sequence[LayerSpec], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    values = sum(spec.num_kv_heads * (spec.head_dim + spec.value_dim) for spec in specs)
    return values * page_size * dtype.itemsize


def num_pages(
    config: EngineConfig,
    page_size: int,
    bytes_a_page: int,
    max_model_len: int,
    device: torch.device,
    activation_bytes: int,
) -> int:
    """Pages of the pool: num_pages wins over kv_cache_memory_bytes, which wins over what is free.

    Without either, what is free is the device's memory within gpu_memory_utilization less `activation_bytes`, which a
    forward pass needs for itself; on a CPU it is a share of the memory, of which no more is taken than 2 GiB or one
    whole context. Never more than all sequences at full length could use.
    """
    if config.num_pages is not None:
        return config.num_pages
    if config.kv_cache_memory_bytes is not None:
        return max(1, config.kv_cache_memory_bytes // bytes_a_page)
    pages_a_context = -(-max_model_len // page_size)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - total * (1 - config.gpu_memory_utilization)) - activation_bytes
    else:
        available = int(psutil.virtual_memory().available * _CPU_SHARE)
        budget = min(available, max(_CPU_BYTES, pages_a_context * bytes_a_page))
    return max(1, min(config.max_num_seqs * pages_a_context, budget // bytes_a_page))
