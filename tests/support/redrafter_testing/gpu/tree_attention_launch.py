# SPDX-License-Identifier: Apache-2.0
"""A batch of trees and caches that the attention kernel is launched with, and its reference.

Import it after tests/triton_kernels/conftest.py, which has kernels interpreted.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import bushy, chain, poisoned, star, token_trees
from vllm_redrafter.config import WORD_BITS
from vllm_redrafter.triton_kernels import tree_attention
from vllm_redrafter.triton_kernels.tree_attention import TreeAttention
from vllm_redrafter.triton_kernels.tree_attention_plan import KeySplit

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""The largest |out - reference| / |reference|, 2-norms over head_dim, of any row and head."""

SENTINEL = 777.0
NO_BLOCK = 2**30
"""A block id far outside the cache: reading it is an access to wild memory."""

Request = tuple[int, list[int]]
"""Context length and tree; no nodes at all for a request that only fills up a batch."""


@dataclass(frozen=True)
class Shape:
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "NHD"


def make_caches(shape: Shape, blocks: int) -> tuple[Tensor, Tensor]:
    """K and V, [blocks, block_size, KV heads, head_dim], all NaN."""
    rows, heads, dim = shape.block_size, shape.kv_heads, shape.head_dim

    def full(*size: int) -> Tensor:
        return torch.full(size, torch.nan).to(shape.cache_dtype or shape.dtype)

    if shape.layout == "NHD":
        return full(blocks, rows, heads, dim), full(blocks, rows, heads, dim)
    if shape.layout == "HND":
        key, value = full(blocks, heads, rows, dim), full(blocks, heads, rows, dim)
        return key.transpose(1, 2), value.transpose(1, 2)
    if shape.layout == "one tensor":
        key, value = full(blocks, 2, rows, heads, dim).unbind(1)
        return key, value
    assert shape.layout == "side by side"
    key, value = full(blocks, heads, rows, 2 * dim).transpose(1, 2).chunk(2, dim=-1)
    return key, value


OF_THE_STEP = (
    *("block_table", "context_lens", "query_start_loc", "ancestors"),
    *("max_nodes", "max_context_len", "depths", "min_requests"),
)


def attend(num_parts: int | None = None, **arguments: Any) -> None:
    """One layer's attention; every request's keys in `num_parts`, or in as many as are planned."""
    of_step = {name: arguments.pop(name) for name in OF_THE_STEP if name in arguments}
    with ExitStack() as stack:
        if num_parts is not None:
            split = KeySplit(num_parts, num_parts, min_keys=1, max_keys=2**30)
            stack.enter_context(patch.object(tree_attention, "plan_split", lambda **_: split))
        TreeAttention(**of_step).attend(**arguments)


class Launch:
    """A batch: what must not be read is NaN or garbage, what surrounds `out` a sentinel."""

    ROWS_BEFORE, ROWS_AFTER = 2, 3

    def __init__(
        self,
        device: torch.device,
        requests: Sequence[Request],
        shape: Shape | None = None,
        *,
        slots: int = 0,
        caches: tuple[Tensor, Tensor] | None = None,
        first_block: int = 0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        shape = shape or Shape()
        self.device, self.shape = device, shape
        context_lens = [n for n, _ in requests]
        parents = [tree for _, tree in requests]
        self.max_nodes = max(map(len, parents))
        self.max_context_len = max(n for n, tree in requests if tree)
        # A tree's tensors are wider than the launch, and there are more of them than requests.
        trees = token_trees([*parents, []], max(slots, self.max_nodes))
        self.trees = trees.select(torch.arange(len(requests)))
        self.ancestors = poisoned(trees.ancestors, trees).to(device)
        self.depths = poisoned(trees.depths, trees).to(device)
        self.context_lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
        starts = torch.tensor([self.ROWS_BEFORE, *map(len, parents)]).cumsum(0)
        self.query_start_loc = starts.to(torch.int32).to(device)

        block_size = shape.block_size
        width = -(-(self.max_context_len + self.max_nodes) // block_size)
        used = [-(-(n + len(tree)) // block_size) if tree else 0 for n, tree in requests]
        free = first_block + torch.randperm(sum(used) + 2, generator=generator)
        key_cache, value_cache = caches or make_caches(shape, len(free))
        table = torch.full((len(requests) + 1, width + 2), NO_BLOCK, dtype=torch.int32)
        for request, ((n, tree), blocks) in enumerate(zip(requests, used, strict=True)):
            table[request, :blocks], free = free[:blocks], free[blocks:]
            positions = torch.arange(n + len(tree) if tree else 0)
            block = table[request, positions // block_size].long()
            slots_of = block.to(key_cache.device), (positions % block_size).to(key_cache.device)
            for cache in (key_cache, value_cache):
                row = randn(len(positions), shape.kv_heads, shape.head_dim).to(cache.dtype)
                # As bytes: fp8 has no indexed assignment.
                bytes_of = cache.view(torch.uint8) if cache.dtype == FP8 else cache
                rows = row.view(torch.uint8) if cache.dtype == FP8 else row
                bytes_of[slots_of] = rows.to(cache.device)
        self.block_table = table.to(device)
        self.key_cache, self.value_cache = key_cache.to(device), value_cache.to(device)

        # Queries are a part of the rows of a larger product, as in a fused QKV projection.
        self.rows = slice(self.ROWS_BEFORE, int(starts[-1]))
        heads = shape.kv_heads * shape.group
        qkv = torch.full((int(starts[-1]) + self.ROWS_AFTER, heads + 2, shape.head_dim), torch.nan)
        qkv[self.rows, :heads] = randn(int(starts[-1]) - self.ROWS_BEFORE, heads, shape.head_dim)
        self.query = qkv.to(shape.dtype).to(device)[:, :heads]
        self.sinks = torch.linspace(-2.0, 3.0, heads).to(shape.dtype).to(device)

    def arguments(self) -> dict[str, Any]:
        """What every call needs."""
        return {
            "query": self.query,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "block_table": self.block_table,
            "context_lens": self.context_lens,
            "query_start_loc": self.query_start_loc,
            "ancestors": self.ancestors,
            "max_nodes": self.max_nodes,
            "max_context_len": self.max_context_len,
        }

    def __call__(self, **options: Any) -> Tensor:
        """`out` of the requests' rows; what surrounds them has been compared already."""
        rows, heads, dim = self.query.shape
        around = self.query.new_full((rows, heads + 1, dim + 16), SENTINEL)
        out = around[:, :heads, :dim]
        attend(**self.arguments() | {"depths": self.depths, "out": out} | options)
        found = out[self.rows].double().cpu()
        out[self.rows] = SENTINEL
        assert (around == SENTINEL).all(), "written outside the requests' rows"
        return found

    def reference(self, **options: Any) -> Tensor:
        options = self.arguments() | options
        for name in ("max_nodes", "max_context_len", "num_parts", "min_requests"):
            options.pop(name, None)
        on_cpu: dict[str, Any] = {
            k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()
        }
        return naive_tree_attention(**on_cpu)[self.rows]

    def check(self, **options: Any) -> None:
        out, expected = self(**options), self.reference(**options)
        smallest = 1e-4  # float16's steps
        error = (out - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=smallest)
        assert error.max() < TOLERANCE[self.shape.dtype]


def naive_tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    ancestors: Tensor,
    *,
    scale: float | None = None,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """`out` by loops, in float64; NaN in rows of no request."""
    heads, head_dim = query.shape[1], query.shape[2]
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.full(query.shape, torch.nan, dtype=torch.float64)
    for request, n in enumerate(context_lens.tolist()):
        first, end = query_start_loc[request : request + 2].tolist()
        for row in range(first, end):
            words = ancestors[request, row - first].cpu()
            bits = words[:, None] >> torch.arange(WORD_BITS) & 1
            seen = bits.flatten().nonzero().flatten().tolist()
            positions = torch.tensor([*range(n), *(n + node for node in seen)])
            # The i-th of these keys is at position i: the context, then one node per depth.
            if sliding_window:
                positions = positions[max(0, len(positions) - sliding_window) :]
            block = block_table[request].cpu()[positions // block_size].long()
            slot = positions % block_size
            keys = key_cache.cpu()[block, slot].double() * key_scale
            values = value_cache.cpu()[block, slot].double() * value_scale
            keys = keys.repeat_interleave(heads // kv_heads, dim=1)
            values = values.repeat_interleave(heads // kv_heads, dim=1)
            scores = torch.einsum("hd,phd->hp", query[row].cpu().double(), keys) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.cpu().double().unsqueeze(1)], dim=1)
            weights = scores.softmax(dim=1)[:, : len(positions)]
            out[row] = torch.einsum("hp,phd->hd", weights, values)
    return out


MIXED: list[Request] = [
    (0, [0]),  # one node and nothing before it
    (37, [0]),  # a plain decode
    (0, bushy(7)),
    (5, []),  # fills up the batch
    (50, chain(10)),
    (33, star(6)),
    (100, bushy(12, seed=1)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
names = {"ids": lambda value: str(value).removeprefix("torch.")}
