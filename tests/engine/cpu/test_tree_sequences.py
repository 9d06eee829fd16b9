# SPDX-License-Identifier: Apache-2.0
"""Trees as sequences of vLLM's kernel give attention along each node's own path."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm import _custom_ops as ops

from redrafter_testing.algorithm.tree_batches import bushy, token_trees
from redrafter_testing.engines.cpu_attention import AttentionVariant, attend, attend_to_trees
from vllm_redrafter.engine.cpu import tree_sequences
from vllm_redrafter.engine.cpu.cache_layout import UNIT
from vllm_redrafter.engine.cpu.tree_sequences import COMPILED_THREADS
from vllm_redrafter.tree.token_tree import TokenTree

BLOCK_SIZE, NUM_BLOCKS = 64, 60
KV_HEADS, GROUP, HEAD_SIZE = 2, 3, 32
POISON = 1e4
"""In unused slots of the cache."""


class Case:
    """Requests with random K and V, laid into a paged cache whose unused slots hold `POISON`."""

    def __init__(
        self, context_lens: list[int], num_nodes: list[int], block_size: int = BLOCK_SIZE
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        parents = [bushy(nodes, seed) for seed, nodes in enumerate(num_nodes)]
        self.tree = token_trees(parents, max(num_nodes))
        self.context_lens = context_lens
        lengths = [n + k for n, k in zip(context_lens, num_nodes, strict=True)]
        shape = (KV_HEADS, HEAD_SIZE)
        self.keys = [torch.randn(n, *shape, generator=generator) for n in lengths]
        self.values = [torch.randn(n, *shape, generator=generator) for n in lengths]
        slots = self.tree.tokens.shape[1]
        heads = KV_HEADS * GROUP
        self.query = torch.randn(len(lengths), slots, heads, HEAD_SIZE, generator=generator)
        self.cache = torch.full((NUM_BLOCKS, KV_HEADS, block_size, 2 * HEAD_SIZE), POISON)
        halves = self.cache.view(NUM_BLOCKS, KV_HEADS, 2 * block_size, HEAD_SIZE).chunk(2, dim=2)
        free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        width = max(-(-n // block_size) for n in lengths)
        self.block_table = torch.full((len(lengths), width + 2), NUM_BLOCKS + 7)
        for r, length in enumerate(lengths):
            position = torch.arange(length)
            blocks = -(-length // block_size)
            self.block_table[r, :blocks] = torch.tensor([free.pop() for _ in range(blocks)])
            first = self.block_table[r, position // block_size] * block_size
            slots = first + position % block_size
            ops.cpu_attn_reshape_and_cache(self.keys[r], self.values[r], *halves, slots, "vec")

    def paged(
        self, variant: AttentionVariant, gap: int = 1, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """[R, T, heads, head size]; unused node slots hold what the output held before, 5.

        Between the rows of two trees are `gap` of other requests, which are no trees.
        """
        is_node, num_nodes = self.tree.is_node, self.tree.num_nodes
        requests, slots = is_node.shape
        root_rows = num_nodes.cumsum(0) - num_nodes + gap * torch.arange(requests) + 1
        rows = (root_rows.unsqueeze(1) + torch.arange(slots))[is_node]
        query = torch.zeros(int(rows[-1]) + 2, *self.query.shape[2:], dtype=dtype)
        query[rows] = self.query[is_node].to(dtype)
        output = torch.full_like(query, 5.0)
        attend_to_trees(
            query,
            self.cache.to(dtype),
            self.tree,
            root_rows,
            torch.tensor(self.context_lens),
            self.block_table,
            variant,
            output,
        )
        out = torch.full(self.query.shape, 5.0, dtype=dtype)
        out[is_node] = output[rows]
        output[rows] = 5.0
        assert (output == 5).all(), "rows of other requests were written"
        return out

    def naive(self, variant: AttentionVariant, request: int, node: int) -> Tensor:
        """[heads, head size] float64, by walking up from the node."""
        path = [node]
        while path[0]:
            path.insert(0, int(self.tree.parents[request, path[0]]))
        n = self.context_lens[request]
        rows = [*range(n), *(n + p for p in path)]
        query_position = len(rows) - 1
        keys = self.keys[request][rows].double().repeat_interleave(GROUP, dim=1)
        values = self.values[request][rows].double().repeat_interleave(GROUP, dim=1)
        query = self.query[request, node].double()
        scores = torch.einsum("hd,phd->hp", query, keys) * variant.scale
        if variant.soft_cap:
            scores = variant.soft_cap * torch.tanh(scores / variant.soft_cap)
        distance = query_position - torch.arange(len(rows))
        if variant.alibi_slopes is not None:
            scores = scores - variant.alibi_slopes.double()[:, None] * distance
        if variant.sliding_window > 0:
            scores = scores.masked_fill(distance >= variant.sliding_window, -math.inf)
        if variant.sinks is not None:
            scores = torch.cat([scores, variant.sinks.double()[:, None]], dim=1)
        weights = scores.softmax(dim=1)[:, : len(rows)]
        return torch.einsum("hp,phd->hd", weights, values)


PLAIN = AttentionVariant(scale=0.3)
HEADS = KV_HEADS * GROUP
VARIANTS = {
    "plain": PLAIN,
    "sliding window": replace(PLAIN, sliding_window=7),
    "window of one": replace(PLAIN, sliding_window=1),
    "soft cap": replace(PLAIN, soft_cap=1.5),
    "ALiBi": replace(PLAIN, alibi_slopes=torch.linspace(0.1, 1.0, HEADS)),
    "sinks": replace(PLAIN, sinks=torch.linspace(-1.0, 2.0, HEADS)),
}


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 5 * BLOCK_SIZE), st.integers(1, 12)), min_size=1, max_size=5
    ),
    variant=st.sampled_from(list(VARIANTS.values())),
    window=st.sampled_from([-1, 1, 31, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 3]),
    part_bytes=st.sampled_from([1, 1 << 15, 1 << 24]),
    threads=st.sampled_from([1, COMPILED_THREADS + 1]),
    block_size=st.sampled_from([UNIT, BLOCK_SIZE]),
    gap=st.sampled_from([0, 3]),
)
def test_any_contexts_and_trees_together(
    sizes: list[tuple[int, int]],
    variant: AttentionVariant,
    window: int,
    part_bytes: int,
    threads: int,
    block_size: int,
    gap: int,
) -> None:
    case = Case([n for n, _ in sizes], [k for _, k in sizes], block_size)
    variant = replace(variant, sliding_window=window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_sequences, "PART_BYTES", part_bytes)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        out = case.paged(variant, gap)
    for request, (_, nodes) in enumerate(sizes):
        # The last node and the root: the others differ from them in nothing but their ancestors.
        for node in {0, nodes - 1}:
            expected = case.naive(variant, request, node)
            torch.testing.assert_close(out[request, node].double(), expected, rtol=1e-4, atol=1e-4)
        assert (out[request, nodes:] == 5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_caches_give_the_same_but_for_rounding(dtype: torch.dtype) -> None:
    case = Case([100, 3], [9, 5])
    for tensor in (case.cache, case.query):
        tensor.copy_(tensor.to(dtype))
    case.keys, case.values = ([x.to(dtype).float() for x in y] for y in (case.keys, case.values))
    found = case.paged(PLAIN, dtype=dtype)
    for node in range(9):
        expected = case.naive(PLAIN, 0, node)
        torch.testing.assert_close(found[0, node].double(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("context", [0, 50, 64, 131])
def test_a_chain_gives_to_the_bit_what_vllm_s_kernel_gives_in_place(
    variant: AttentionVariant, context: int
) -> None:
    nodes = 9
    generator = torch.Generator().manual_seed(2)
    length = context + nodes
    query = torch.randn(nodes, HEADS, HEAD_SIZE, generator=generator)
    rows = torch.randn(2, length, KV_HEADS, HEAD_SIZE, generator=generator)
    cache = torch.zeros(4, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    block_table = torch.tensor([[2, 1, 3]], dtype=torch.int32)
    position = torch.arange(length)
    slots = block_table[0].long()[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    keys, values = cache.view(4, KV_HEADS, 2 * BLOCK_SIZE, HEAD_SIZE).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        *rows, keys, values, slots, "vec", k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    start, end = torch.tensor([0, nodes]).int(), torch.tensor([length]).int()
    expected, ours = torch.empty_like(query), torch.empty_like(query)
    attend(query, cache, start, end, block_table, variant, expected)
    chain = torch.arange(nodes, dtype=torch.int32).unsqueeze(0)
    tree = TokenTree(chain, (chain - 1).clamp(min=0), chain, torch.tensor([nodes]).int())
    root, context_lens = torch.zeros(1, dtype=torch.int64), torch.tensor([context])
    attend_to_trees(query, cache, tree, root, context_lens, block_table, variant, ours)
    assert torch.equal(ours, expected)
