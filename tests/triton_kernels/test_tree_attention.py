# SPDX-License-Identifier: Apache-2.0
"""The attention kernel equals float64 attention along each node's own path, and touches no more."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter_testing.algorithm.tree_batches import bushy, chain, star
from redrafter_testing.gpu.tree_attention_launch import (
    DTYPES,
    FP8,
    MIXED,
    NO_BLOCK,
    TOLERANCE,
    Launch,
    Request,
    Shape,
    names,
)
from vllm_redrafter.triton_kernels.tree_attention_arguments import HEAD_DIMS

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")


SHAPES = [
    *(Shape(head_dim=size, dtype=torch.bfloat16, kv_heads=1) for size in HEAD_DIMS),
    *(
        Shape(layout=layout, dtype=torch.bfloat16, kv_heads=3, head_dim=80)
        for layout in ("NHD", "HND", "one tensor", "side by side")
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_head_dim_and_layout_is_exact(launch: Callable[..., Launch], shape: Shape) -> None:
    launch([(45, bushy(9)), (16, chain(17))], shape).check(num_parts=2)


@pytest.mark.usefixtures("needs_fp8")
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_an_fp8_cache_is_scaled(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    batch = launch(MIXED, Shape(dtype=dtype, cache_dtype=FP8, layout="one tensor"))
    batch.check(num_parts=num_parts, key_scale=0.25, value_scale=2.5)


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("window", [1, 40])
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
def test_large_scores_do_not_overflow(launch: Callable[..., Launch], num_parts: int) -> None:
    """Scores of thousands, exact in fp32 as they are integers; e^{2s/c} of the cap is infinite."""
    batch = launch(MIXED, Shape(dtype=torch.float32))
    batch.query.copy_(batch.query.mul(8).round())
    batch.key_cache.copy_(batch.key_cache.mul(8).round())
    batch.check(scale=1.0, num_parts=num_parts)
    batch.check(scale=1.0, num_parts=num_parts, soft_cap=2.0)
    # Sinks far above the scores of some rows, which fp32 leaves at 0, and far below others.
    options = {"scale": 1.0, "sinks": batch.sinks * 500}
    out, expected = batch(**options, num_parts=num_parts), batch.reference(**options)
    assert (out - expected).abs().max() < TOLERANCE[torch.float32] * expected.abs().max()


@pytest.mark.parametrize("num_parts", [1, 5])
@pytest.mark.parametrize("shape", [chain, star, bushy])
def test_trees_of_128_nodes_are_exact(
    launch: Callable[..., Launch], shape: Callable[[int], list[int]], num_parts: int
) -> None:
    """All words of the bit sets, bit 31 included; with 3 heads to a group, tiles are not full."""
    batch = launch([(29, shape(128)), (70, [0])], Shape(group=3, kv_heads=1))
    batch.check(num_parts=num_parts)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_launch_may_exceed_its_trees(launch: Callable[..., Launch], num_parts: int) -> None:
    """As in a CUDA graph: sizes for the largest batch, most requests without nodes."""
    batch = launch([(20, bushy(5)), (0, []), (9, []), (11, chain(3)), (2**20, [])], slots=64)
    batch.max_nodes, batch.max_context_len = 64, 40
    batch.block_table = torch.nn.functional.pad(batch.block_table, (0, 6), value=NO_BLOCK)
    batch.check(num_parts=num_parts, sliding_window=12)


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
    group=st.sampled_from([1, 3, 7]),
    block_size=st.sampled_from([16, 48]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    layout=st.sampled_from(["NHD", "HND", "one tensor"]),
)


@settings(deadline=None, max_examples=40)
@given(
    requests=requests_of_a_batch,
    shape=shapes,
    num_parts=st.sampled_from([1, 2, 5]),
    window=st.just(0) | st.integers(1, 40) | st.just(1000),
    scale=st.sampled_from([0.125, 0.7]),
    soft_cap=st.sampled_from([0.0, 2.0]),
    with_sinks=st.booleans(),
)
def test_whatever_the_batch_it_is_exact(
    device: torch.device,
    requests: list[Request],
    shape: Shape,
    num_parts: int,
    window: int,
    scale: float,
    soft_cap: float,
    with_sinks: bool,
) -> None:
    batch = Launch(device, requests, shape)
    batch.check(
        num_parts=num_parts,
        sliding_window=window,
        scale=scale,
        soft_cap=soft_cap,
        sinks=batch.sinks if with_sinks else None,
    )
