"""Which tiles and aims a sweep tries."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from tree_attention_parts.candidates import (
    TunedShape,
    aims_neighbours,
    tile_neighbours,
    tuned_shapes,
)

from vllm_redrafter.triton_kernels.tree_attention_plan import AIMS
from vllm_redrafter.triton_kernels.tree_attention_tiles import TILES, Tile
from vllm_redrafter.triton_kernels.tree_attention_tuning import SIZES, WARPS


def changes(before: object, after: object) -> dict[str, object]:
    old, new = asdict(before), asdict(after)  # type: ignore[call-overload]
    return {name: new[name] for name in old if new[name] != old[name]}


def test_every_tile_of_two_bytes_has_a_shape_and_the_most_usual_head_size_comes_first() -> None:
    shapes = tuned_shapes()
    assert {shape.key for shape in shapes} == {
        (size, dim, tile.rows)
        for (size, dim), tiles in TILES.items()
        for tile in tiles
        if size == 2
    }
    assert [shape.heads.dim for shape in shapes[:4]] == [128] * 4


@pytest.mark.parametrize("shape", tuned_shapes(), ids=str)
def test_its_trees_have_the_rows_that_the_tile_is_for(shape: TunedShape) -> None:
    assert shape.nodes.nodes * shape.heads.query // shape.heads.kv == shape.rows


def test_a_tile_s_neighbours_differ_in_one_number() -> None:
    tile = Tile(32, 32, 4, 5, 255)
    assert [changes(tile, other) for other in tile_neighbours(tile, 128)] == [
        {"rows": 16},
        {"rows": 64},
        {"keys": 16},
        {"keys": 64},
        {"num_warps": 2},
        {"num_warps": 8},
        {"num_stages": 3},
        {"num_stages": 7},
        {"max_registers": 128},
        {"max_registers": 168},
        {"max_registers": None},
    ]


@pytest.mark.parametrize("shape", tuned_shapes(), ids=str)
def test_all_neighbours_are_tiles_that_a_table_may_have_and_registers_hold(
    shape: TunedShape,
) -> None:
    (usual,) = (tile for tile in TILES[2, shape.heads.dim] if tile.rows == shape.rows)
    tried = list(tile_neighbours(usual, shape.heads.dim))
    assert usual not in tried and len(tried) == len(set(tried)) >= 7
    for tile in tried:
        assert tile.rows in SIZES and tile.keys in SIZES and tile.num_warps in WARPS
        assert tile.rows * shape.heads.dim / (32 * tile.num_warps) <= 128


def test_aims_neighbours_are_half_or_twice_one_number() -> None:
    assert [changes(AIMS, other) for other in aims_neighbours(AIMS)] == [
        {"programs_per_multiprocessor": 1},
        {"programs_per_multiprocessor": 4},
        {"min_keys": 128},
        {"min_keys": 512},
        {"max_keys": 1024},
        {"max_keys": 4096},
        {"long_context_parts": 4},
        {"long_context_parts": 16},
    ]
