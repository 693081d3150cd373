"""Paged attention in plain torch, for every device: the reference of the other backends, and the CPU's own.

A step's rows come in two kinds, and the batch lists them in this order:

    decode rows    parts of one token, longest context first. Rows of similar length form a group: their pages are
                   gathered head by head, [rows * Hkv, L, D], and two batched matmuls do the rest. A group is small
                   enough for what it gathers to stay in the cache of the CPU.
    prefill parts  one after the other. Without earlier tokens the fresh keys are attended directly; else
                   the pages are gathered, and queries go in blocks, so that the mask stays bounded.

Index tensors depend on a layer only by its number of key/value heads and its window, and are made once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import AttentionBackend, LayerSpec
from engine.batch import Batch
from engine.kv import KVPool

_GROUP_WASTE = 0.2  # share of a group's gathered tokens that may be padding


@dataclass(slots=True)
class Group:
    """Decode rows [first, last) of the batch."""

    first: int
    last: int
    kv_index: Tensor  # int64 [rows * Hkv * P]: rows of the pool seen as [pages * Hkv, page_size * D]
    mask: Tensor  # [rows, 1, 1, L], 0 or -inf


@dataclass(slots=True)
class Chunk:
    """The rows [first, last) of the batch are the tokens [start, start + last - first) of one sequence."""

    first: int
    last: int
    start: int
    kv_index: Tensor | None  # int64 [Hkv * P] as above; None if start == 0


class Plan:
    """Index tensors of a step, made when the first layer of a kind asks for them."""

    def __init__(self, batch: Batch, pool: KVPool, group_tokens: int) -> None:
        self.batch, self.pool, self.group_tokens = batch, pool, group_tokens
        counts = np.diff(batch.q_start)
        self.num_decodes = int(np.argmax(counts != 1)) if (counts != 1).any() else len(counts)
        self._made: dict[tuple[str, int, int | None], Any] = {}

    def groups(self, spec: LayerSpec) -> list[Group]:
        return self._once("groups", spec, lambda: list(self._groups(spec)))

    def chunks(self, spec: LayerSpec) -> list[Chunk]:
        return self._once("chunks", spec, lambda: list(self._chunks(spec)))

    def write_index(self, spec: LayerSpec) -> Tensor:
        """int64 [T * Hkv]: rows of the pool seen as [pages * Hkv * page_size, D]"""
        return self._once("write_index", spec, lambda: self._write_index(spec))

    def _once(self, what: str, spec: LayerSpec, make: Callable[[], Any]) -> Any:
        key = (what, spec.num_kv_heads, spec.window)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _write_index(self, spec: LayerSpec) -> Tensor:
        size, slots = self.pool.page_size, self.batch.slots[:, None]
        heads = torch.arange(spec.num_kv_heads, device=slots.device)
        return ((slots // size * spec.num_kv_heads + heads) * size + slots % size).view(-1)

    def _groups(self, spec: LayerSpec) -> Iterator[Group]:
        kv_len = self.batch.kv_len[: self.num_decodes]
        size = self.pool.page_size
        # First position that each row still sees, and the page that holds it.
        seen_from = np.maximum(kv_len - spec.window, 0) if spec.window else np.zeros_like(kv_len)
        first_page = seen_from // size
        num_pages = -(-kv_len // size) - first_page
        table = torch.from_numpy(self.batch.page_table)
        for first, last in split(num_pages.tolist(), self.group_tokens // size):
            width = int(num_pages[first:last].max())
            columns = first_page[first:last, None] + np.arange(width)
            columns = np.minimum(columns, table.shape[1] - 1)  # what lies beyond is masked
            pages = table[first:last].gather(1, torch.from_numpy(columns)).to(self.pool.device)
            position = first_page[first:last, None] * size + np.arange(width * size)
            hidden = (position >= kv_len[first:last, None]) | (position < seen_from[first:last, None])
            mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0)[:, None, None]).to(self._dtype).to(self.pool.device)
            yield Group(first, last, self._kv_index(pages, spec), mask)

    def _chunks(self, spec: LayerSpec) -> Iterator[Chunk]:
        q_start = self.batch.q_start.tolist()
        for part in range(self.num_decodes, len(self.batch.kv_len)):
            first, last, kv_len = q_start[part], q_start[part + 1], int(self.batch.kv_len[part])
            start, kv_index = kv_len - (last - first), None
            if start:
                pages = torch.from_numpy(self.batch.page_table[part, : -(-kv_len // self.pool.page_size)])
                kv_index = self._kv_index(pages[None].to(self.pool.device), spec)
            yield Chunk(first, last, start, kv_index)

    @property
    def _dtype(self) -> torch.dtype:
        return self.pool.keys[0].dtype

    @staticmethod
    def _kv_index(pages: Tensor, spec: LayerSpec) -> Tensor:
        """pages [rows, P] -> [rows * Hkv * P]"""
        heads = torch.arange(spec.num_kv_heads, device=pages.device)[:, None]
        return (pages[:, None] * spec.num_kv_heads + heads).reshape(-1)


def split(num_pages: list[int], most_pages: int) -> Iterator[tuple[int, int]]:
    """Cut rows into runs [first, last) of bounded padding and size: at most `most_pages` together, or a single row."""
    first, widest, used = 0, 0, 0
    for row, pages in enumerate(num_pages):
        width = max(widest, pages)
        full = width * (row - first + 1)
        if row > first and (full > most_pages or full - used - pages > _GROUP_WASTE * full):
            yield first, row
            first, widest, used = row, pages, pages
        else:
            widest, used = width, used + pages
    if num_pages:
        yield first, len(num_pages)


class SdpaBackend(AttentionBackend):
    name = "sdpa"

    def __init__(self, group_tokens: int = 8192, mask_elements: int = 1 << 22) -> None:
        """group_tokens: of context that a group of decode rows gathers at most (one row may have more);
        mask_elements: of one block of prefill queries, its rows * context."""
        self._group_tokens, self._mask_elements = group_tokens, mask_elements

    def prepare(self, batch: Batch, pool: KVPool) -> Plan:
        return Plan(batch, pool, self._group_tokens)

    def run(
        self,
        layer: int,
        spec: LayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        pool: KVPool,
        plan: Plan,
    ) -> Tensor:
        write_index = plan.write_index(spec)
        pool.keys[layer].view(-1, spec.head_dim).index_copy_(0, write_index, key.reshape(-1, spec.head_dim))
        pool.values[layer].view(-1, spec.value_dim).index_copy_(0, write_index, value.reshape(-1, spec.value_dim))
        outputs = []
        for group in plan.groups(spec):
            k, v = (
                pages.view(-1, pages.shape[2] * pages.shape[3])  # the tokens of a head in a page: one row
                .index_select(0, group.kv_index)
                .view((group.last - group.first) * spec.num_kv_heads, -1, pages.shape[3])
                for pages in (pool.keys[layer], pool.values[layer])
            )
            outputs.append(_decode(query[group.first : group.last], k, v, group.mask, spec, sinks))
        outputs += self._attend_chunks(layer, spec, query, key, value, sinks, pool, plan)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_chunks(
        self,
        layer: int,
        spec: LayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        pool: KVPool,
        plan: Plan,
    ) -> Iterator[Tensor]:
        """The outputs of the prefill parts, in order; their keys and values have been written."""
        for chunk in plan.chunks(spec):
            rows = slice(chunk.first, chunk.last)
            if chunk.kv_index is None:
                k, v = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
            else:
                k, v = (
                    pages.view(-1, pages.shape[2] * pages.shape[3])
                    .index_select(0, chunk.kv_index)
                    .view(spec.num_kv_heads, -1, pages.shape[3])[:, : chunk.start + chunk.last - chunk.first]
                    for pages in (pool.keys[layer], pool.values[layer])
                )
            yield _prefill(query[rows], k, v, chunk.start, spec, sinks, self._mask_elements)


def _decode(query: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
    """query [B, Hq, D], k [B * Hkv, L, D], v [B * Hkv, L, Dv], mask [B, 1, 1, L] -> [B, Hq, Dv]"""
    rows, group = query.shape[0], spec.num_heads // spec.num_kv_heads
    q = query.reshape(-1, group, spec.head_dim)
    mask = mask.expand(rows, spec.num_kv_heads, 1, -1).reshape(-1, 1, k.shape[1])
    if spec.softcap is None:
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=spec.scale)
    else:
        scores = _cap(torch.bmm(q, k.transpose(1, 2)) * spec.scale, spec.softcap) + mask
    if sinks is not None:
        sinks = sinks.view(spec.num_kv_heads, group, 1).repeat(rows, 1, 1)
    return torch.bmm(_softmax(scores, sinks), v).view(rows, spec.num_heads, spec.value_dim)


def _prefill(
    query: Tensor, k: Tensor, v: Tensor, start: int, spec: LayerSpec, sinks: Tensor | None, mask_elements: int
) -> Tensor:
    """query [n, Hq, D] at the positions start.., k [Hkv, L, D], v [Hkv, L, Dv], L = start + n -> [n, Hq, Dv]"""
    num_queries, length, group = query.shape[0], k.shape[1], spec.num_heads // spec.num_kv_heads
    q = query.reshape(num_queries, spec.num_kv_heads, group, -1).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    k, v = k.unsqueeze(1), v.unsqueeze(1)  # one head for the G query heads: expanded, never copied
    plain = spec.softcap is None and sinks is None
    if plain and start == 0 and (spec.window is None or spec.window >= length):
        k, v = k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale)
        return out.permute(2, 0, 1, 3).reshape(num_queries, spec.num_heads, spec.value_dim)
    blocks = []
    step = max(16, mask_elements // length)
    if not plain:
        step = max(16, step // spec.num_heads)  # the scores of all heads are there at once
    for first in range(0, num_queries, step):
        last = min(first + step, num_queries)
        seen = slice(max(0, start + first + 1 - spec.window) if spec.window else 0, start + last)
        mask = _causal(start + first, start + last, seen, spec.window, query.device)
        out = _attend(q[:, :, first:last], k[:, :, seen], v[:, :, seen], mask, spec, sinks)
        blocks.append(out.permute(2, 0, 1, 3).reshape(last - first, spec.num_heads, spec.value_dim))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _causal(first: int, last: int, seen: slice, window: int | None, device: torch.device) -> Tensor:
    """True where the query at a position of [first, last) sees the key at a position of `seen`."""
    position = torch.arange(first, last, device=device)[:, None]
    at = torch.arange(seen.start, seen.stop, device=device)
    mask = at <= position
    return mask & (at > position - window) if window else mask


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
    """q [Hkv, G, n, D], k [Hkv, 1, L, D], v [Hkv, 1, L, Dv], mask bool [n, L] -> [Hkv, G, n, Dv]"""
    group = q.shape[1]
    if spec.softcap is None and sinks is None:
        k, v = k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)
    scores = torch.matmul(q, k.transpose(2, 3)) * spec.scale
    if spec.softcap is not None:
        scores = _cap(scores, spec.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sinks = sinks.view(spec.num_kv_heads, group, 1, 1).expand(-1, -1, scores.shape[2], 1)
    return torch.matmul(_softmax(scores, sinks), v)


def _cap(scores: Tensor, softcap: float) -> Tensor:
    return torch.tanh(scores / softcap) * softcap


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension, in float32; `sinks` is a column more, whose share is dropped."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
    with_sinks = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    return torch.softmax(with_sinks, dim=-1, dtype=torch.float32)[..., :-1].to(scores.dtype)
