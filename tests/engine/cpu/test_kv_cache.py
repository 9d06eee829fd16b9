# SPDX-License-Identifier: Apache-2.0
"""K and V in any order of a block: rows that are moved, and units that are copied for trees."""

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm.v1.utils import CpuGpuBuffer

from redrafter_testing.engines.cpu_layouts import ORDERS, lay_out, layout_of
from vllm_redrafter.drafting.walk import moves
from vllm_redrafter.engine.cpu import kv_cache
from vllm_redrafter.engine.cpu.cache_layout import UNIT
from vllm_redrafter.engine.cpu.kv_cache import compact, stack_layers
from vllm_redrafter.engine.cpu.tree_sequences import COMPILED_THREADS, CopiedUnits, PathCopies
from vllm_redrafter.utils.compiled import Array

BLOCK_SIZE, KV_HEADS, HEAD_SIZE, BLOCKS = 32, 2, 32, 3
DTYPES = [torch.float32, torch.bfloat16]


def random_rows(layers: int) -> Tensor:
    """K and V, [2, layers, blocks, KV heads, B, head size]."""
    return torch.randn(2, layers, BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)


@st.composite
def accepted_paths(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Paths (node 0, then growing node numbers) and disjoint first rows."""
    slots = draw(st.integers(1, 6))
    requests = draw(st.integers(1, 4))
    paths = [
        [0, *sorted(draw(st.sets(st.integers(1, slots - 1)) if slots > 1 else st.just(set())))]
        for _ in range(requests)
    ]
    first_rows = [r * slots for r in range(requests)]
    return [path + [-1] * (slots - len(path)) for path in paths], first_rows


@settings(max_examples=60, deadline=None)  # the first call compiles
@given(
    accepted_paths(),
    st.randoms(use_true_random=False),
    st.sampled_from(list(ORDERS)),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_compaction_equals_a_naive_copy(
    case: tuple[list[list[int]], list[int]],
    rng: object,
    order: str,
    dtype: torch.dtype,
    shared_out: bool,
) -> None:
    paths, first_rows = case
    slot_of = list(range(BLOCKS * BLOCK_SIZE))
    rng.shuffle(slot_of)  # type: ignore[attr-defined]
    # A batch that vLLM made anew has a second buffer, which stays empty.
    slots = CpuGpuBuffer(
        len(slot_of), dtype=torch.int64, device=torch.device("cpu"), pin_memory=False
    )
    slots.gpu = torch.tensor(slot_of)
    rows = random_rows(layers=3).to(dtype)
    caches = lay_out(order, rows)

    source, destination = moves(torch.tensor(paths), torch.tensor(first_rows))
    with pytest.MonkeyPatch.context() as patch:
        if shared_out:  # among torch's threads
            patch.setattr(kv_cache, "COMPILED_THREADS", 0)
        layout_of(order, HEAD_SIZE, BLOCK_SIZE, dtype)  # is then known
        stacks = stack_layers(caches.unbind(0), {2 * HEAD_SIZE: order})
        compact([stacks], [SimpleNamespace(slot_mapping=slots)], source, destination)

    read, written = [], []
    for path, first in zip(paths, first_rows, strict=True):
        for depth, node in enumerate(path):
            if node >= 0:
                read.append(slot_of[first + node])
                written.append(slot_of[first + depth])
    by_slot = rows.transpose(3, 4).flatten(2, 3).clone()
    by_slot[:, :, written] = by_slot[:, :, read]
    moved = by_slot.view(2, -1, BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE).transpose(3, 4)
    assert torch.equal(caches, lay_out(order, moved))


def test_evenly_spaced_layers_of_one_allocation_are_one_stack() -> None:
    layers = list(torch.randn(5, BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE).unbind(0))
    isas = {2 * HEAD_SIZE: "vec"}
    ((numbers, _),) = stack_layers([*layers, layers[2]], isas)  # a shared cache counts once
    assert [of.ctypes.data for of in numbers] == [layer.data_ptr() for layer in layers]
    assert len(stack_layers([layers[i] for i in (0, 1, 4)], isas)) == 3
    assert len(stack_layers([layer.clone() for layer in layers], isas)) == 5


def pairs(of: Iterable[tuple[int, int]]) -> Array:
    """[N, 2] int64, of none as well."""
    return np.array(list(of), dtype=np.int64).reshape(-1, 2)


@settings(deadline=None)  # the first call compiles
@given(
    sizes=st.tuples(st.sampled_from([32, 64, 128]), st.sampled_from([32, 48, 80])),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(list(ORDERS)),
    units=st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, 3)), min_size=1),
    moves=st.lists(
        st.tuples(
            st.integers(0, BLOCKS - 1),
            st.integers(0, 127),
            st.integers(0, 1000),
            st.integers(0, UNIT - 1),
        )
    ),
    threads=st.sampled_from([1, COMPILED_THREADS + 1]),
)
def test_units_are_copied_and_rows_moved_behind_that(
    sizes: tuple[int, int],
    dtype: torch.dtype,
    order: str,
    units: list[tuple[int, int]],
    moves: list[tuple[int, int, int, int]],
    threads: int,
) -> None:
    block_size, head_size = sizes
    rows = torch.randn(2, BLOCKS, KV_HEADS, block_size, head_size).to(dtype)
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
