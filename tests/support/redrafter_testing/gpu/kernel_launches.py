# SPDX-License-Identifier: Apache-2.0
"""The kernels' launches in the engine's shapes, on CPU tensors whose contents do not matter."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.triton_kernels.accept_path import accept_path
from vllm_redrafter.triton_kernels.build_tree import (
    DraftRows,
    NodeLimits,
    ScoredTrees,
    TreeBuffers,
    build_tree,
)
from vllm_redrafter.triton_kernels.candidates import choose_candidates, rank_candidates
from vllm_redrafter.triton_kernels.compact_kv import CacheTable, compact_kv
from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer
from vllm_redrafter.triton_kernels.find_matches import (
    LONGEST_MATCH,
    MatchBuffers,
    find_matches,
)
from vllm_redrafter.triton_kernels.gated_layer import Rows, gated_cell, scale_normed
from vllm_redrafter.triton_kernels.gather_dot import gather_dot
from vllm_redrafter.triton_kernels.grow_beams import BeamBuffers, grow_beams
from vllm_redrafter.triton_kernels.join_matches import (
    JoinedBuffers,
    SearchedNodes,
    join_matches,
)
from vllm_redrafter.triton_kernels.observe_matches import observe_matches
from vllm_redrafter.triton_kernels.observe_nodes import COLUMNS, VerifiedTrees, observe_nodes
from vllm_redrafter.triton_kernels.rope_positions import add_depths
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees, stage_trees
from vllm_redrafter.triton_kernels.top_candidates import TopTokens, top_candidates
from vllm_redrafter.triton_kernels.tree_attention import tree_attention

CONTEXT = 4096
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
}
"""Queries' and cache's, by the name of the cache's."""
DRAFT_KERNELS = 6
"""How many of `draft_cases` it takes to launch each kernel of a draft."""


@dataclass(frozen=True)
class Attention:
    """One launch of tree attention, of K + 1 `nodes` and keys in `parts`, with its variants."""

    head_dim: int = 128
    dtype: str = "bf16"
    group: int = 4
    nodes: int = 33
    block_size: int = 16
    parts: int = 8
    window: bool = False
    cap: bool = False
    sinks: bool = False
    lse: bool = False

    def __call__(self) -> None:
        """As engine/cuda/attention.py: K and V are halves of one row of 2 x head_dim."""
        query_dtype, cache_dtype = DTYPES[self.dtype]
        kv_heads, blocks = 2, -(-(CONTEXT + self.nodes) // self.block_size)
        row = torch.zeros(blocks, kv_heads, self.block_size, 2 * self.head_dim, dtype=cache_dtype)
        key_cache, value_cache = row.transpose(1, 2).split(self.head_dim, dim=-1)
        heads = kv_heads * self.group
        tree_attention(
            torch.zeros(self.nodes, heads, self.head_dim, dtype=query_dtype),
            key_cache,
            value_cache,
            integers(1, blocks),
            integers(1),
            integers(2),
            integers(1, self.nodes, -(-self.nodes // 32)),
            self.nodes,
            CONTEXT,
            depths=integers(1, self.nodes),
            sliding_window=1024 if self.window else 0,
            soft_cap=30.0 if self.cap else 0.0,
            sinks=torch.zeros(heads, dtype=query_dtype) if self.sinks else None,
            lse=torch.zeros(self.nodes, heads) if self.lse else None,
            num_parts=self.parts,
        )


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def step_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The kernels around attention, by name."""
    for most in (8, 32, 64, 127):
        yield f"K {most}", partial(step, most + 1)
    for width, length in ((4, 5), (8, 5), (32, 8), (64, 32)):
        yield f"beams {width}x{length}", partial(build, width, length)


def draft_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The draft's kernels, by name: one case of each first, DRAFT_KERNELS in all."""
    yield "bf16 V 128k, 4 beams", lambda: level(torch.bfloat16, 128_256, 4)
    yield "bf16 16 rows, state", lambda: state_layer(torch.bfloat16, 16)
    yield "K 12, L 5", lambda: learn(13, 5)
    yield "bf16 64 rows, gated", lambda: gated_layers(torch.bfloat16, 64)
    yield "2 paths of 8, 32k tokens", lambda: match(2, 8, 32_768)
    yield "bf16 V 128k, 128 candidates", lambda: candidates(torch.bfloat16, 128_256, 128, 4)
    yield "bf16 16 rows", lambda: layers(torch.bfloat16, 16)
    yield "fp32 V 32k, 16 beams", lambda: level(torch.float32, 32_000, 16)
    yield "bf16 V 256k, 50 beams", lambda: level(torch.bfloat16, 262_208, 50)
    yield "bf16 64 rows", lambda: layers(torch.bfloat16, 64)
    yield "fp32 16 rows", lambda: layers(torch.float32, 16)
    yield "bf16 16 rows, gated", lambda: gated_layers(torch.bfloat16, 16)
    yield "fp32 16 rows, gated", lambda: gated_layers(torch.float32, 16)
    yield "fp32 V 32k, 128 candidates", lambda: candidates(torch.float32, 32_768, 128, 4)
    yield "bf16 V 128k, 512 candidates", lambda: candidates(torch.bfloat16, 128_256, 512, 50)
    yield "4 paths of 8, 1M tokens", lambda: match(4, 8, 2**20)


def level(dtype: torch.dtype, vocabulary: int, width: int) -> None:
    """top_candidates and grow_beams, for one request's level after the first."""
    top_candidates(torch.zeros(width, vocabulary, dtype=dtype), width)
    found = torch.zeros(width, width)
    grow_beams(
        TopTokens(found, found.int(), found[0]),
        1,
        1,
        BeamBuffers(1, 5, width, "cpu"),
        to_target=torch.zeros(vocabulary, dtype=torch.int64),
        survival=(torch.zeros(1), torch.zeros(5)),
    )


def state_layer(dtype: torch.dtype, rows: int, hidden: int = 4096) -> None:
    """draft_layer with all that a state needs."""
    x, weight = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(hidden, hidden, dtype=dtype)
    looked_up = Product(x, weight, torch.zeros(rows, dtype=torch.int64))
    continued = Product(x, weight, integers(rows))
    draft_layer(looked_up, torch.zeros_like(x), continued, bias=x[0], silu=True)


def layers(dtype: torch.dtype, rows: int, hidden: int = 4096) -> None:
    """draft_layer: the state, the input projection and a residual block."""
    state_layer(dtype, rows, hidden)
    x, out = torch.zeros(2, rows, hidden, dtype=dtype)
    weight = torch.zeros(hidden, 2 * hidden, dtype=dtype)
    condition = torch.zeros(rows // 4, hidden, dtype=dtype)
    draft_layer(Product(x, weight[:, hidden:]), out, addend=condition)
    draft_layer(Product(x, weight[:, :hidden]), out, bias=x[0], silu=True, residual=x)


def gated_layers(dtype: torch.dtype, rows: int, hidden: int = 4096) -> None:
    """gated_cell, draft_layer as the gated head's residual block, and scale_normed."""
    x, out = torch.zeros(2, rows, hidden, dtype=dtype)
    weight = torch.zeros(2 * hidden, 2 * hidden, dtype=dtype)
    embedded = Rows(x, torch.zeros(rows, dtype=torch.int64))
    gated_cell(embedded, Rows(x, integers(rows)), weight, weight[0], out, 1e-6)
    block = Product(x, weight[:hidden, :hidden])
    draft_layer(block, out, bias=x[0], silu=True, residual=x, epsilon=1e-6)
    scale_normed(x, x[0], out, 1e-6)


def candidates(dtype: torch.dtype, vocabulary: int, count: int, width: int) -> None:
    """choose_candidates of 5 levels, and gather_dot and rank_candidates of one below the first."""
    hidden = 4096
    choose_candidates(torch.zeros(5, vocabulary, dtype=dtype), 1, count, width)
    x, chosen = torch.zeros(width, hidden, dtype=dtype), integers(1, count)
    weight = torch.zeros(count, hidden, dtype=dtype)
    for scale in (None, x[0]):
        gather_dot(x, weight, chosen, scale=scale, epsilon=1e-6)
    rank_candidates(torch.zeros(width, count), chosen, width)


def learn(slots: int, depths: int, requests: int = 2) -> None:
    """observe_nodes."""
    tree = integers(requests, slots)
    observe_nodes(
        torch.zeros(requests, dtype=torch.int64),
        torch.zeros(requests, slots),
        VerifiedTrees(tree, tree, tree, integers(requests), tree),
        torch.zeros(1),
        torch.zeros(depths),
        torch.zeros(requests, depths, COLUMNS),
        torch.zeros(depths, COLUMNS),
    )


def match(paths: int, depth: int, tokens: int, requests: int = 2) -> None:
    """find_matches; join_matches to a search of 4x5; observe_matches of trees of 12 nodes."""
    found = MatchBuffers(requests, paths, depth, tokens, "cpu")
    entries = torch.zeros(requests, dtype=torch.int64)
    find_matches(integers(requests, tokens), integers(requests), entries, 32_000, found)
    probabilities, temperatures = torch.zeros(2, LONGEST_MATCH, depth), torch.zeros(requests)
    nodes, scores = torch.zeros(requests, 5, 4, dtype=torch.int64), torch.zeros(requests, 5, 4)
    join_matches(
        SearchedNodes(nodes, nodes, scores, scores),
        found,
        probabilities,
        temperatures,
        JoinedBuffers(requests, (4, 5), (paths, depth), "cpu"),
    )
    tree = integers(requests, 13)
    observe_matches(
        entries,
        tree,
        VerifiedTrees(tree, tree, tree, integers(requests), tree),
        temperatures,
        256.0,
        torch.zeros(2, LONGEST_MATCH, depth, 2),
        probabilities,
    )


def step(slots: int, requests: int = 2) -> None:
    """stage_trees, add_depths, accept_path and compact_kv."""
    table, staged = TreeBuffers(4, slots - 1, "cpu"), StagedTrees(4, slots - 1, "cpu")
    rows = requests * slots
    stage_trees(
        table,
        integers(requests),
        integers(requests + 1),
        integers(requests + 1),
        integers(requests),
        torch.zeros(rows, dtype=torch.int64),
        staged,
        requests,
    )
    add_depths(staged, integers(requests + 1), torch.zeros(3, rows + 1, dtype=torch.int64))
    path, num_sampled, row_start = integers(requests, slots), integers(requests), integers(requests)
    accept_path(
        staged.tokens[:requests],
        staged.parents[:requests],
        staged.depths[:requests],
        staged.ancestors[:requests],
        staged.num_nodes[:requests],
        torch.zeros(rows, dtype=torch.int64),
        row_start,
        integers(requests, slots),
        num_sampled,
        path,
        integers(requests),
    )
    caches = [torch.zeros(8, 8, 16, 256, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)]
    compact_kv(
        CacheTable.of(caches), path, num_sampled, row_start, torch.zeros(rows, dtype=torch.int64)
    )


def build(width: int, length: int, requests: int = 2) -> None:
    """build_tree."""
    root_tokens = torch.zeros(requests, dtype=torch.int64)
    build_tree(
        root_tokens,
        torch.zeros(requests, length, width, dtype=torch.int64),
        torch.zeros(requests, length, width, dtype=torch.int32),
        torch.zeros(requests, length, width),
        ScoredTrees(requests, 127, "cpu"),
        entries=root_tokens,
        log_odds=torch.zeros(requests, length, width),
        node_limits=NodeLimits(integers(requests), integers(requests)),
        rows=DraftRows(torch.zeros(requests, 127, dtype=torch.int64), torch.zeros(requests, 127)),
        match_lengths=integers(requests, length, width),
    )
