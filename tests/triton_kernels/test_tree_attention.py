# SPDX-License-Identifier: Apache-2.0
"""The attention kernel equals float64 attention along each node's own path, and touches no more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter_testing.algorithm.tree_batches import bushy, chain, star
from redrafter_testing.engines.cpu_attention import AttentionVariant, attend_to_trees
from redrafter_testing.gpu.tree_attention_launch import (
    DTYPES,
    FP8,
    MIXED,
    NO_BLOCK,
    TOLERANCE,
    Launch,
    Request,
    Shape,
    assert_close,
    names,
)
from vllm_redrafter.triton_kernels.tree_attention import tree_attention
from vllm_redrafter.triton_kernels.tree_attention_arguments import HEAD_DIMS

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's CPU build computes the other side")
def test_the_reference_is_attention_along_each_nodes_path(device: torch.device) -> None:
    """It reads bit sets; the CPU engine's attention has been tested to go by parents."""
    requests = [request for request in MIXED if request[1]]
    launch = Launch(torch.device("cpu"), requests, Shape(block_size=32))
    # As vLLM's CPU backend keeps it; poison would meet weights of zero there.
    keys = launch.key_cache.nan_to_num(0).permute(0, 2, 3, 1)
    values = launch.value_cache.nan_to_num(0).transpose(1, 2)
    cache = torch.cat([keys.flatten(2), values.flatten(2)], dim=2).unflatten(2, (keys.shape[3], -1))
    variant = AttentionVariant(
        scale=0.2, sliding_window=11, soft_cap=1.5, sinks=launch.sinks.float()
    )
    options = {"scale": 0.2, "sliding_window": 11, "soft_cap": 1.5, "sinks": launch.sinks}
    query = launch.query.contiguous()
    out = torch.empty_like(query)
    attend_to_trees(
        query,
        cache,
        launch.trees,
        launch.query_start_loc[: len(requests)].long(),
        launch.context_lens,
        launch.block_table[: len(requests)],
        variant,
        out,
    )
    assert_close(out[launch.rows].double(), launch.reference(**options)[0], 1e-5)


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_trees_and_plain_decodes_in_one_launch_are_exact(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    launch(MIXED, Shape(dtype=dtype)).check(num_parts=num_parts)


def test_there_may_be_more_parts_than_keys(launch: Callable[..., Launch]) -> None:
    launch([(0, [0]), (3, bushy(6)), (70, chain(2))]).check(num_parts=64)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_nan_in_the_unused_slots_of_a_used_block_stays_there(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    """They are in the same tile as the last keys; a weight of zero would not keep NaN out."""
    batch = launch([(20, chain(3)), (15, [0]), (17, bushy(4))], Shape(dtype=dtype))
    for request, length in enumerate((23, 16, 21)):
        last = int(batch.block_table[request, (length - 1) // 16])
        used = (length - 1) % 16 + 1
        for cache in (batch.key_cache, batch.value_cache):
            assert cache[last, :used].isfinite().all() and cache[last, used:].isnan().all()
    batch.check(num_parts=num_parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **names)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_is_exact(
    launch: Callable[..., Launch], head_dim: int, dtype: torch.dtype
) -> None:
    batch = launch([(45, bushy(9)), (3, chain(4))], Shape(head_dim=head_dim, dtype=dtype))
    batch.check(num_parts=1)
    batch.check(num_parts=2)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_every_group_of_query_heads_shares_its_kv_head(
    launch: Callable[..., Launch], group: int
) -> None:
    batch = launch([(20, bushy(9)), (40, [0])], Shape(kv_heads=3, group=group))
    batch.check(num_parts=1)
    batch.check(num_parts=2)


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 256])
def test_contexts_may_end_at_and_around_a_blocks_edge(
    launch: Callable[..., Launch], block_size: int
) -> None:
    """The tree then begins a block, fills its last slot, or lies on both sides of the edge."""
    ends = (block_size - 5, block_size - 1, block_size, block_size + 1)
    batch = launch([(n, bushy(5, seed=n)) for n in ends], Shape(block_size=block_size))
    batch.check(num_parts=1)
    batch.check(num_parts=3)


@pytest.mark.parametrize("context_len", [31, 32, 33, 63, 64, 65, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], **names)
def test_contexts_may_end_at_and_around_a_tiles_edge(
    launch: Callable[..., Launch], context_len: int, dtype: torch.dtype
) -> None:
    """The tree's first bit set is looked at in the tile of keys in which the tree begins."""
    batch = launch([(context_len, bushy(6)), (context_len, [0])], Shape(dtype=dtype))
    batch.check(num_parts=1)
    batch.check(num_parts=2)


@pytest.mark.parametrize("layout", ["NHD", "HND", "one tensor", "side by side"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **names)
def test_caches_may_have_any_strides(
    launch: Callable[..., Launch], layout: str, dtype: torch.dtype
) -> None:
    shape = Shape(layout=layout, dtype=dtype, kv_heads=3, head_dim=80)
    launch([(45, bushy(9)), (16, chain(17))], shape).check(num_parts=2)


@pytest.mark.usefixtures("needs_fp8")
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_an_fp8_cache_is_scaled(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    batch = launch(MIXED, Shape(dtype=dtype, cache_dtype=FP8, layout="one tensor"))
    batch.check(num_parts=num_parts, key_scale=0.25, value_scale=2.5)


VARIANTS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.7},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "window of one": {"sliding_window": 1},
    "window within the tree": {"sliding_window": 5},
    "window from the tree into the context": {"sliding_window": 20},
    "window of a tile": {"sliding_window": 64},
    "window beyond everything": {"sliding_window": 1000},
    "all at once": {"scale": 0.7, "soft_cap": 3.0, "sinks": True, "sliding_window": 9},
}


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_variant_is_exact(
    launch: Callable[..., Launch], variant: dict[str, Any], num_parts: int
) -> None:
    batch = launch([*MIXED, (64, chain(20)), (3, chain(20))])
    sinks = {"sinks": batch.sinks} if "sinks" in variant else {}
    batch.check(**variant | sinks, num_parts=num_parts)


@pytest.mark.usefixtures("needs_fp8")
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], **names)
def test_all_variants_at_once_are_exact_with_an_fp8_cache(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    shape = Shape(dtype=dtype, cache_dtype=FP8, head_dim=80, group=3, layout="HND")
    batch = launch([*MIXED, (64, chain(20))], shape)
    options = VARIANTS["all at once"] | {"sinks": batch.sinks, "key_scale": 0.5, "value_scale": 3.0}
    batch.check(**options, num_parts=num_parts)


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("window", [1, 9, 40])
def test_nothing_before_the_window_is_read(
    launch: Callable[..., Launch], window: int, num_parts: int
) -> None:
    """vLLM frees the blocks there: their rows are another request's by now."""
    batch = launch([(100, chain(6)), (37, bushy(8)), (64, [0])])
    for request, n in enumerate(batch.context_lens.tolist()):
        first = max(0, n - window + 1)
        for position in range(first):
            block = int(batch.block_table[request, position // 16])
            batch.key_cache[block, position % 16] = torch.nan
            batch.value_cache[block, position % 16] = torch.nan
        batch.block_table[request, : first // 16] = NO_BLOCK
    batch.check(sliding_window=window, num_parts=num_parts)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **names)
def test_large_scores_do_not_overflow(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    """Scores of thousands, exact in fp32 as they are integers; e^{2s/c} of the cap is infinite."""
    batch = launch(MIXED, Shape(dtype=dtype))
    batch.query.copy_(batch.query.mul(8).round())
    batch.key_cache.copy_(batch.key_cache.mul(8).round())
    assert batch.reference(scale=1.0)[1].max() > 1000
    batch.check(scale=1.0, num_parts=num_parts)
    batch.check(scale=1.0, num_parts=num_parts, soft_cap=2.0)
    # Sinks far above the scores of some rows, which fp32 leaves at 0, and far below others.
    options = {"scale": 1.0, "sinks": batch.sinks * 500}
    out, expected = batch(**options, num_parts=num_parts)[0], batch.reference(**options)[0]
    assert (out - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("num_parts", [1, 5])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("shape", [chain, star, bushy])
def test_trees_of_128_nodes_are_exact(
    launch: Callable[..., Launch], shape: Callable[[int], list[int]], group: int, num_parts: int
) -> None:
    """All words of the bit sets, bit 31 included; with 4 heads to a group, 4 tiles of rows."""
    batch = launch([(29, shape(128)), (70, [0])], Shape(group=group, kv_heads=1))
    batch.check(num_parts=num_parts)


def test_rows_that_do_not_fill_their_tiles_are_exact(launch: Callable[..., Launch]) -> None:
    """3 heads of 70 nodes are 210 rows: in the second of two tiles, a node's heads are apart."""
    batch = launch([(29, bushy(70)), (12, chain(43)), (12, bushy(42))], Shape(group=3, kv_heads=1))
    batch.check(num_parts=1)
    batch.check(num_parts=2, sliding_window=30)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_launch_may_be_larger_than_its_trees(
    launch: Callable[..., Launch], num_parts: int
) -> None:
    """As in a CUDA graph: sizes for the largest batch, most requests without nodes."""
    batch = launch([(20, bushy(5)), (0, []), (9, []), (11, chain(3)), (2**20, [])], slots=64)
    batch.max_nodes, batch.max_context_len = 64, 40
    batch.block_table = torch.nn.functional.pad(batch.block_table, (0, 6), value=NO_BLOCK)
    batch.check(num_parts=num_parts, sliding_window=12)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_64_requests_are_exact(launch: Callable[..., Launch], num_parts: int) -> None:
    requests = [(n, bushy(1 + n % 4, seed=n)) for n in range(64)]
    launch(requests, Shape(kv_heads=1, group=1)).check(num_parts=num_parts)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_repeated_launch_gives_the_same_bits(
    launch: Callable[..., Launch], num_parts: int
) -> None:
    batch = launch(MIXED)
    out, lse = torch.empty_like(batch.query), batch.query.new_empty(batch.query.shape[:2])
    results = []
    for _ in range(2):
        tree_attention(**batch.arguments(), out=out, lse=lse, num_parts=num_parts)
        results.append((out[batch.rows].clone(), lse[batch.rows].clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.usefixtures("needs_fp8")
def test_a_cache_may_be_larger_than_2_to_the_31_elements(launch: Callable[..., Launch]) -> None:
    """2 GiB of address space; only the blocks in use take memory (all of it on a GPU)."""
    shape = Shape(cache_dtype=FP8, kv_heads=1)
    blocks = 2**20 + 8
    cache = torch.empty(blocks, 2, 16, 1, 64, dtype=torch.uint8, device=launch([(0, [0])]).device)
    key_cache, value_cache = cache.view(FP8).unbind(1)
    batch = launch(
        [(20, bushy(5)), (16, [0])], shape, caches=(key_cache, value_cache), first_block=blocks - 6
    )
    assert int(batch.block_table[0, 0]) * key_cache.stride(0) >= 2**31
    batch.check(num_parts=1)


requests_of_a_batch = st.lists(
    st.tuples(
        st.integers(0, 70),
        st.lists(st.integers(0, 1000), max_size=20).map(
            lambda draws: [0, *(draw % node for node, draw in enumerate(draws, start=1))]
        ),
    ),
    min_size=1,
    max_size=4,
)
# What a kernel is compiled for varies little: on a GPU, each combination takes seconds.
shapes = st.builds(
    Shape,
    head_dim=st.sampled_from([64, 80]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    block_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    layout=st.sampled_from(["NHD", "HND", "one tensor"]),
)


@settings(deadline=None, max_examples=30)
@given(
    requests=requests_of_a_batch,
    shape=shapes,
    num_parts=st.sampled_from([1, 2, 5]),
    window=st.just(0) | st.integers(1, 40),
    soft_cap=st.sampled_from([0.0, 2.0]),
    with_sinks=st.booleans(),
)
def test_whatever_the_batch_it_is_exact(
    device: torch.device,
    requests: list[Request],
    shape: Shape,
    num_parts: int,
    window: int,
    soft_cap: float,
    with_sinks: bool,
) -> None:
    batch = Launch(device, requests, shape)
    batch.check(
        num_parts=num_parts,
        sliding_window=window,
        soft_cap=soft_cap,
        sinks=batch.sinks if with_sinks else None,
    )
