"""Tree attention over paged K and V equals attention along each node's own path."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_redrafter.engine.cpu import tree_gather, tree_parts
from vllm_redrafter.engine.cpu.kv_cache import key_value_views
from vllm_redrafter.engine.cpu.tree_attention import (
    AttentionVariant,
    TreeQueries,
    paged_tree_attention,
)
from vllm_redrafter.engine.cpu.tree_gather import Workspace
from vllm_redrafter.engine.cpu.tree_tiles import COMPILED_THREADS
from vllm_redrafter.token_tree import TokenTree

BLOCK_SIZE, NUM_BLOCKS = 32, 40
KV_HEADS, GROUP, HEAD_SIZE = 2, 3, 32


def for_amx(cache: Tensor) -> Tensor:
    """The same K and V, laid out for AMX."""
    made = torch.empty_like(cache)
    blocks = cache.shape[0]
    keys, values = key_value_views(cache)
    amx_keys, amx_values = key_value_views(made, amx=True)
    pairs = keys.view(blocks, KV_HEADS, HEAD_SIZE // 2, 2, BLOCK_SIZE // 16, 16)
    amx_keys.copy_(pairs.permute(0, 1, 4, 2, 5, 3))
    pairs = values.view(blocks, KV_HEADS, BLOCK_SIZE // 2, 2, HEAD_SIZE // 16, 16)
    amx_values.copy_(pairs.permute(0, 1, 4, 2, 5, 3))
    return made


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
        key_cache, value_cache = key_value_views(self.cache)
        free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        width = max(-(-n // BLOCK_SIZE) for n in lengths)
        self.block_table = torch.full((len(lengths), width + 2), NUM_BLOCKS + 7)
        for r, length in enumerate(lengths):
            for position in range(length):
                index, offset = divmod(position, BLOCK_SIZE)
                if offset == 0:
                    self.block_table[r, index] = free.pop()
                block = int(self.block_table[r, index])
                key_cache[block, :, :, offset] = self.keys[r][position]
                value_cache[block, :, offset] = self.values[r][position]

    def paged(
        self, variant: AttentionVariant, dtype: torch.dtype = torch.float32, amx: bool = False
    ) -> Tensor:
        """[R, T, heads, head size]; unused node slots hold what the output held before, 5."""
        shape = self.query.shape
        # One row more: of another request, which is no tree.
        query = torch.cat([self.query.flatten(0, 1), torch.ones(1, *shape[2:])])
        output = torch.full_like(query, 5.0, dtype=dtype)
        cache, queries = self.cache.to(dtype), replace(self.queries(), amx=amx)
        if amx:
            cache = for_amx(cache)
        paged_tree_attention(query.to(dtype), cache, queries, variant, output, Workspace())
        assert (output[-1] == 5).all()
        return output[:-1].view(shape)

    def queries(self) -> TreeQueries:
        return TreeQueries(
            tree=self.tree,
            rows=self._rows(),
            context_lens=torch.tensor(self.context_lens),
            block_table=self.block_table,
            block_size=BLOCK_SIZE,
        )

    def _rows(self) -> Tensor:
        node = torch.arange(self.tree.tokens.shape[1])
        root = torch.arange(len(self.keys)).unsqueeze(1) * len(node)
        return root + node.masked_fill(~self.tree.is_node, 0)

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


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize(
    ("context_lens", "num_nodes"),
    [
        ([0], [1]),
        ([0, 5], [7, 3]),
        ([BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1], [9, 9, 9]),
        ([100, 3, 31, 64], [17, 1, 5, 33]),
    ],
    ids=["root only", "empty context", "block edges", "mixed sizes"],
)
def test_every_node_attends_to_its_context_and_ancestors_alone(
    variant: AttentionVariant, context_lens: list[int], num_nodes: list[int]
) -> None:
    case = Case(context_lens, num_nodes, poison=1e4)
    out = case.paged(variant)
    for request, nodes in enumerate(num_nodes):
        for node in range(nodes):
            expected = case.naive(variant, request, node)
            torch.testing.assert_close(out[request, node].double(), expected, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 5 * BLOCK_SIZE), st.integers(1, 12)), min_size=1, max_size=5
    ),
    variant=st.sampled_from(list(VARIANTS.values())),
    window=st.sampled_from([-1, 1, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 3]),
    split=st.booleans(),
    piece_bytes=st.sampled_from([1, 3 * BLOCK_SIZE * HEAD_SIZE * 4 * KV_HEADS, 1 << 24]),
)
def test_any_contexts_and_trees_together(
    sizes: list[tuple[int, int]],
    variant: AttentionVariant,
    window: int,
    split: bool,
    piece_bytes: int,
) -> None:
    case = Case([n for n, _ in sizes], [k for _, k in sizes], poison=1e4)
    variant = replace(variant, sliding_window=window)
    with pytest.MonkeyPatch.context() as patch:
        if split:  # a part per length, rather than one
            patch.setattr(tree_parts, "PADDING_BYTES", 0)
        patch.setattr(tree_gather, "PIECE_BYTES", piece_bytes)
        out = case.paged(variant)
    for request, (_, nodes) in enumerate(sizes):
        # The last node and the root: the others differ from them in nothing but their ancestors.
        for node in {0, nodes - 1}:
            expected = case.naive(variant, request, node)
            torch.testing.assert_close(out[request, node].double(), expected, rtol=1e-4, atol=1e-4)
        assert (out[request, nodes:] == 5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_caches_are_widened_before_the_products(dtype: torch.dtype) -> None:
    case = Case([100, 3], [9, 5], poison=1e4)
    for tensor in (case.cache, case.query):
        tensor.copy_(tensor.to(dtype))
    case.keys, case.values = ([x.to(dtype).float() for x in y] for y in (case.keys, case.values))
    wide, narrow = case.paged(PLAIN), case.paged(PLAIN, dtype)
    # Rounded once, at the end.
    assert torch.equal(wide.to(dtype), narrow)
    expected = case.naive(PLAIN, 0, 8)
    torch.testing.assert_close(wide[0, 8].double(), expected, rtol=1e-4, atol=1e-5)


BENT = {name: variant for name, variant in VARIANTS.items() if not variant.is_fusable}


@pytest.mark.parametrize("variant", BENT.values(), ids=BENT.keys())
@pytest.mark.parametrize("split", [False, True])
def test_a_cache_laid_out_for_amx_gives_the_same_to_the_bit_where_scores_are_bent(
    variant: AttentionVariant, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:  # a part per length, rather than one, and a piece per block
        monkeypatch.setattr(tree_parts, "PADDING_BYTES", 0)
        monkeypatch.setattr(tree_gather, "PIECE_BYTES", 1)
    case = Case([100, 3, BLOCK_SIZE, 0], [9, 5, 12, 1], poison=1e4)
    plain = case.paged(variant, torch.bfloat16)
    assert torch.equal(case.paged(variant, torch.bfloat16, amx=True), plain)


@pytest.mark.parametrize("window", [-1, 1, 7, 5 * BLOCK_SIZE])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("threads", [1, COMPILED_THREADS + 1])
def test_tiles_of_bfloat16_give_the_same_but_for_rounding(
    window: int, split: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:  # a part per length, rather than one
        monkeypatch.setattr(tree_parts, "PADDING_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    num_nodes = [9, 5, 12, 1, 4]
    case = Case([100, 3, BLOCK_SIZE, 0, 700], num_nodes, poison=1e4)
    variant = replace(PLAIN, sliding_window=window)
    expected = case.paged(variant, torch.bfloat16)
    found = case.paged(variant, torch.bfloat16, amx=True)
    # Weights are rounded before they are multiplied, so by up to 2^-9 of the largest value.
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-6)
    # Rows of no node are left as they were.
    assert ((found == 5) == (expected == 5)).all()


def test_tiles_see_nothing_of_what_is_hidden() -> None:
    first = Case([20, 70], [5, 12], poison=3.0).paged(PLAIN, torch.bfloat16, amx=True)
    second = Case([20, 70], [5, 12], poison=-500.0).paged(PLAIN, torch.bfloat16, amx=True)
    is_node = random_trees([5, 12]).is_node
    assert torch.equal(first[is_node], second[is_node])


def test_layers_of_several_shapes_and_windows_share_a_step() -> None:
    """They use one workspace after another, and one plan per shape and window."""
    first, second = Case([40, 9], [5, 5], poison=3.0), Case([40, 9], [5, 5], poison=3.0)
    second.cache = second.cache[:, :1].contiguous()  # one KV head, and the group's query heads
    queries, workspace = first.queries(), Workspace()
    windowed = replace(PLAIN, sliding_window=4)
    found = []
    for _ in range(2):
        for variant in (PLAIN, windowed):
            for case, heads in ((first, HEADS), (second, GROUP)):
                query = first.query.flatten(0, 1)[:, :heads]
                output = torch.empty(query.shape)
                args = query, case.cache, queries, variant, output, workspace
                paged_tree_attention(*args)
                found.append(output)
    for variant, whole, head in ((PLAIN, found[0], found[1]), (windowed, found[2], found[3])):
        expected = first.paged(variant).flatten(0, 1)
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(head, expected[:, :GROUP], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found[:4], found[4:], strict=True))
    assert len(queries._products) == 4


def test_what_is_hidden_has_no_influence_at_all() -> None:
    first = Case([20, 70], [5, 12], poison=3.0).paged(PLAIN)
    second = Case([20, 70], [5, 12], poison=-500.0).paged(PLAIN)
    is_node = random_trees([5, 12]).is_node
    assert torch.equal(first[is_node], second[is_node])


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_chain_gives_what_vllm_s_own_kernel_gives(variant: AttentionVariant) -> None:
    """The conventions (ALiBi's sign, the window's edge, sinks) are vLLM's."""
    vllm_ops = pytest.importorskip("vllm._custom_ops")
    head_size, block_size, context, nodes = 32, 32, 50, 9
    generator = torch.Generator().manual_seed(2)
    length = context + nodes
    query = torch.randn(nodes, HEADS, head_size, generator=generator)
    rows = torch.randn(2, length, KV_HEADS, head_size, generator=generator)
    cache = torch.zeros(4, KV_HEADS, block_size, 2 * head_size)
    block_table = torch.tensor([[2, 1]], dtype=torch.int32)
    position = torch.arange(length)
    slots = block_table[0].long()[position // block_size] * block_size + position % block_size
    key_cache, value_cache = cache.view(4, KV_HEADS, 2 * block_size, head_size).chunk(2, dim=2)
    kernel: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
    vllm_ops.cpu_attn_reshape_and_cache(
        rows[0], rows[1], key_cache, value_cache, slots, "vec", **kernel
    )
    start, end = torch.tensor([0, nodes]).int(), torch.tensor([length]).int()
    metadata = vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_size,
        seq_lens=end,
        dtype=torch.float32,
        query_start_loc=start,
        causal=True,
        sliding_window_size=variant.sliding_window,
        isa="vec",
        enable_kv_split=True,
        dynamic_causal=None,
        kv_cache_dtype="auto",
    )
    expected = torch.empty(nodes, HEADS, head_size)
    vllm_ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=expected,
        query_start_loc=start,
        seq_lens=end,
        scale=variant.scale,
        causal=True,
        alibi_slopes=variant.alibi_slopes,
        sliding_window=variant.sliding_window,
        block_table=block_table,
        softcap=variant.soft_cap,
        scheduler_metadata=metadata,
        s_aux=variant.sinks,
        dynamic_causal=None,
        **kernel,
    )
    chain = torch.arange(nodes, dtype=torch.int32).unsqueeze(0)
    tree = TokenTree(chain, (chain - 1).clamp(min=0), chain, torch.tensor([nodes]).int())
    queries = TreeQueries(tree, chain.long(), torch.tensor([context]), block_table, block_size)
    ours = torch.empty_like(query)
    paged_tree_attention(query, cache, queries, variant, ours, Workspace())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
