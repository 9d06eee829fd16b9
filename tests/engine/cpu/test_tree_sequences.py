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

from redrafter_testing.engines.cpu_attention import AttentionVariant, attend, attend_to_trees
from vllm_redrafter.engine.cpu import tree_sequences
from vllm_redrafter.engine.cpu.path_copies import COMPILED_THREADS
from vllm_redrafter.tree.token_tree import TokenTree

BLOCK_SIZE, NUM_BLOCKS = 64, 40
KV_HEADS, GROUP, HEAD_SIZE = 2, 3, 32


def random_trees(num_nodes: list[int], seed: int = 0) -> TokenTree:
    """Trees with random parents; tokens do not matter to attention."""
    generator = torch.Generator().manual_seed(seed)
    slots = max(num_nodes)
    parents = torch.zeros(len(num_nodes), slots, dtype=torch.int32)
    depths = torch.zeros_like(parents)
    for r, nodes in enumerate(num_nodes):
        for node in range(1, nodes):
            parent = int(torch.randint(node, (), generator=generator))
            parents[r, node] = parent
            depths[r, node] = depths[r, parent] + 1
    return TokenTree(torch.zeros_like(parents), parents, depths, torch.tensor(num_nodes).int())


class Case:
    """Requests with random K and V, laid into a paged cache whose unused slots hold NaN."""

    def __init__(self, context_lens: list[int], num_nodes: list[int], poison: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tree = random_trees(num_nodes)
        self.context_lens = context_lens
        lengths = [n + k for n, k in zip(context_lens, num_nodes, strict=True)]
        shape = (KV_HEADS, HEAD_SIZE)
        self.keys = [torch.randn(n, *shape, generator=generator) for n in lengths]
        self.values = [torch.randn(n, *shape, generator=generator) for n in lengths]
        slots = self.tree.tokens.shape[1]
        heads = KV_HEADS * GROUP
        self.query = torch.randn(len(lengths), slots, heads, HEAD_SIZE, generator=generator)
        self.cache = torch.full((NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), poison)
        halves = self.cache.view(NUM_BLOCKS, KV_HEADS, 2 * BLOCK_SIZE, HEAD_SIZE).chunk(2, dim=2)
        free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        width = max(-(-n // BLOCK_SIZE) for n in lengths)
        self.block_table = torch.full((len(lengths), width + 2), NUM_BLOCKS + 7)
        for r, length in enumerate(lengths):
            position = torch.arange(length)
            blocks = -(-length // BLOCK_SIZE)
            self.block_table[r, :blocks] = torch.tensor([free.pop() for _ in range(blocks)])
            first = self.block_table[r, position // BLOCK_SIZE] * BLOCK_SIZE
            slots = first + position % BLOCK_SIZE
            ops.cpu_attn_reshape_and_cache(self.keys[r], self.values[r], *halves, slots, "vec")

    def paged(self, variant: AttentionVariant, dtype: torch.dtype = torch.float32) -> Tensor:
        """[R, T, heads, head size]; unused node slots hold what the output held before, 5."""
        is_node = self.tree.is_node
        # One row more before and behind: of other requests, which are no trees.
        query = torch.nn.functional.pad(self.query[is_node], (0, 0, 0, 0, 1, 1)).to(dtype)
        output = torch.full_like(query, 5.0)
        root_rows = self.tree.num_nodes.cumsum(0) - self.tree.num_nodes + 1
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
        assert (output[[0, -1]] == 5).all()
        out = torch.full(self.query.shape, 5.0, dtype=dtype)
        out[is_node] = output[1:-1]
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
)
def test_any_contexts_and_trees_together(
    sizes: list[tuple[int, int]],
    variant: AttentionVariant,
    window: int,
    part_bytes: int,
    threads: int,
) -> None:
    case = Case([n for n, _ in sizes], [k for _, k in sizes], poison=1e4)
    variant = replace(variant, sliding_window=window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_sequences, "PART_BYTES", part_bytes)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        out = case.paged(variant)
    for request, (_, nodes) in enumerate(sizes):
        # The last node and the root: the others differ from them in nothing but their ancestors.
        for node in {0, nodes - 1}:
            expected = case.naive(variant, request, node)
            torch.testing.assert_close(out[request, node].double(), expected, rtol=1e-4, atol=1e-4)
        assert (out[request, nodes:] == 5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_caches_give_the_same_but_for_rounding(dtype: torch.dtype) -> None:
    case = Case([100, 3], [9, 5], poison=1e4)
    for tensor in (case.cache, case.query):
        tensor.copy_(tensor.to(dtype))
    case.keys, case.values = ([x.to(dtype).float() for x in y] for y in (case.keys, case.values))
    found = case.paged(PLAIN, dtype)
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
