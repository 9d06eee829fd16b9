"""Compaction moves the accepted path's rows, all layers at once, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.utils import CpuGpuBuffer

from vllm_redrafter.engine.cpu.attention import check_cache_layout
from vllm_redrafter.engine.cpu.kv_cache import compact, key_value_rows, stack_layers
from vllm_redrafter.engine.cpu.runner import TreeModelRunner
from vllm_redrafter.engine.cpu.walk import moves

BLOCK_SIZE, KV_HEADS, HEAD_SIZE, BLOCKS = 32, 2, 32, 3


def layers_in_one_allocation(count: int) -> list[torch.Tensor]:
    """As vLLM allocates them: evenly spaced in one buffer."""
    shape = (count, BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    return list(torch.randn(shape).unbind(0))


def rows(cache: torch.Tensor, amx: bool = False) -> list[torch.Tensor]:
    """K and V of a layer by slot: [slots, KV heads, head size] each."""
    return [
        half.transpose(1, 2).reshape(-1, KV_HEADS, HEAD_SIZE) for half in key_value_rows(cache, amx)
    ]


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 128), (32, 32), (128, 64)])
def test_rows_are_what_vllm_wrote(isa: str, head_size: int, block_size: int) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    check_cache_layout(isa, head_size, block_size, torch.bfloat16)


def test_the_layouts_are_as_they_are_described() -> None:
    numbers = torch.arange(BLOCK_SIZE * HEAD_SIZE).view(1, 1, BLOCK_SIZE, HEAD_SIZE)
    cache = torch.cat([numbers, numbers], dim=2).view(1, 1, BLOCK_SIZE, 2 * HEAD_SIZE)
    keys, values = (half[0, 0] for half in key_value_rows(cache, amx=True))
    for token, entry in ((0, 0), (1, 0), (0, 1), (17, 5), (31, 31), (16, 18)):
        at = (token // 16, entry // 2, token % 16, entry % 2)
        assert keys[token, entry] == np.ravel_multi_index(at, (2, HEAD_SIZE // 2, 16, 2))
        at = (entry // 16, token // 2, entry % 16, token % 2)
        assert values[token, entry] == np.ravel_multi_index(at, (2, BLOCK_SIZE // 2, 16, 2))


def test_layers_of_one_allocation_are_one_stack() -> None:
    layers = layers_in_one_allocation(5)
    (stack,) = stack_layers([*layers, layers[2]])  # a shared cache counts once
    assert stack.shape[0] == 5
    for view, layer in zip(stack, layers, strict=True):
        assert view.data_ptr() == layer.data_ptr()
        assert torch.equal(view, layer)


def test_layers_of_their_own_are_stacks_of_their_own() -> None:
    layers = [torch.randn(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE) for _ in range(3)]
    uneven = [layers_in_one_allocation(5)[i] for i in (0, 1, 4)]
    assert [s.shape[0] for s in stack_layers(layers)] == [1, 1, 1]
    assert [s.shape[0] for s in stack_layers(uneven)] == [1, 1, 1]


@st.composite
def accepted_paths(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Paths (node 0, then growing node numbers) and disjoint first rows."""
    slots = draw(st.integers(1, 6))
    requests = draw(st.integers(1, 4))
    paths = [
        [0, *sorted(draw(st.sets(st.integers(1, slots - 1)) if slots > 1 else st.just(set())))]
        for _ in range(requests)
    ]
    return [path + [-1] * (slots - len(path)) for path in paths], [
        r * slots for r in range(requests)
    ]


@settings(max_examples=60, deadline=None)
@given(accepted_paths(), st.randoms(use_true_random=False), st.booleans())
def test_compaction_equals_a_naive_copy(
    case: tuple[list[list[int]], list[int]], rng: object, amx: bool
) -> None:
    paths, first_rows = case
    slot_of = list(range(BLOCKS * BLOCK_SIZE))
    rng.shuffle(slot_of)  # type: ignore[attr-defined]
    slot_mapping = torch.tensor(slot_of)
    layers = layers_in_one_allocation(3)
    before = [[part.clone() for part in rows(layer, amx)] for layer in layers]

    source, destination = moves(torch.tensor(paths), torch.tensor(first_rows))
    compact(stack_layers(layers), slot_mapping[source], slot_mapping[destination], amx)

    for layer, old in zip(layers, before, strict=True):
        for now, was in zip(rows(layer, amx), old, strict=True):
            expected = was.clone()
            for path, first in zip(paths, first_rows, strict=True):
                for depth, node in enumerate(path):
                    if node >= 0:
                        expected[slot_of[first + depth]] = was[slot_of[first + node]]
            assert torch.equal(now, expected)


def test_a_path_in_place_moves_nothing() -> None:
    source, destination = moves(
        torch.tensor([[0, 1, 2, -1], [0, -1, -1, -1]]), torch.tensor([0, 4])
    )
    assert source.numel() == destination.numel() == 0


def test_slots_are_read_where_vllm_computes_them() -> None:
    """A batch that vLLM made anew, after the first, has a second buffer, which stays empty."""
    slots = CpuGpuBuffer(
        BLOCKS * BLOCK_SIZE, dtype=torch.int64, device=torch.device("cpu"), pin_memory=False
    )
    slots.gpu.copy_(torch.randperm(BLOCKS * BLOCK_SIZE))
    layers = layers_in_one_allocation(2)
    before = [rows(layer)[1].clone() for layer in layers]
    runner = SimpleNamespace(
        _kv_stacks=[(stack_layers(layers), False)],
        input_batch=SimpleNamespace(block_table=[SimpleNamespace(slot_mapping=slots)]),
    )
    TreeModelRunner._move_kv_rows(runner, torch.tensor([3, 7]), torch.tensor([1, 2]))
    for layer, was in zip(layers, before, strict=True):
        expected = was.clone()
        expected[slots.gpu[[1, 2]]] = was[slots.gpu[[3, 7]]]
        assert torch.equal(rows(layer)[1], expected)
