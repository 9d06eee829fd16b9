# SPDX-License-Identifier: Apache-2.0
"""What is copied for a step's trees, in any order in which vLLM keeps K and V."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.engines.cpu_layouts import ORDERS, lay_out, layout_of
from vllm_redrafter.engine.cpu.cache_layout import UNIT
from vllm_redrafter.engine.cpu.path_copies import COMPILED_THREADS, CopiedUnits, PathCopies
from vllm_redrafter.engine.cpu.tree_plan import Array

NUM_BLOCKS, KV_HEADS = 7, 2
LAYOUTS = st.tuples(
    st.sampled_from([32, 64, 128]),  # block size
    st.sampled_from([32, 48, 80]),  # head size
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(list(ORDERS)),
)


def random_rows(block_size: int, head_size: int, dtype: torch.dtype) -> Tensor:
    """K and V, [2, blocks, KV heads, B, head size]."""
    generator = torch.Generator().manual_seed(3)
    shape = 2, NUM_BLOCKS, KV_HEADS, block_size, head_size
    return torch.randn(shape, generator=generator).to(dtype)


def pairs(of: Iterable[tuple[int, int]]) -> Array:
    """[N, 2] int64, of none as well."""
    return np.array(list(of), dtype=np.int64).reshape(-1, 2)


@settings(deadline=None)  # the first call compiles
@given(
    layout=LAYOUTS,
    units=st.lists(st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, 3)), min_size=1),
    moves=st.lists(
        st.tuples(
            st.integers(0, NUM_BLOCKS - 1),
            st.integers(0, 127),
            st.integers(0, 1000),
            st.integers(0, UNIT - 1),
        )
    ),
    threads=st.sampled_from([1, COMPILED_THREADS + 1]),
)
def test_units_are_copied_and_rows_moved_behind_that(
    layout: tuple[int, int, torch.dtype, str],
    units: list[tuple[int, int]],
    moves: list[tuple[int, int, int, int]],
    threads: int,
) -> None:
    block_size, head_size, dtype, order = layout
    rows = random_rows(block_size, head_size, dtype)
    units = [(block, place % (block_size // UNIT)) for block, place in units]
    # By where they go, as no two go to one place.
    kept = {(unit % len(units), place): (b, p % block_size) for b, p, unit, place in moves}
    copies = PathCopies(pairs(units), pairs(kept.values()), pairs(kept.keys()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        copied = CopiedUnits(layout_of(order, head_size, block_size, dtype))
        found = copied.write(copies, lay_out(order, rows))
    expected = torch.stack(
        [rows[:, block, :, place * UNIT : (place + 1) * UNIT] for block, place in units], dim=1
    )
    for (unit, to), (block, place) in kept.items():
        expected[:, unit, :, to] = rows[:, block, :, place]
    assert torch.equal(found, lay_out(order, expected))
