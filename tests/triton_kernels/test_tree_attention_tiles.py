"""How the attention kernel's work is cut: keys into parts, rows and keys into tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from redrafter_testing.algorithm.tree_batches import bushy
from redrafter_testing.gpu.tree_attention_launch import (
    DTYPES,
    Launch,
    Shape,
    assert_close,
    names,
)
from vllm_redrafter.triton_kernels import tree_attention as tree_attention_module
from vllm_redrafter.triton_kernels.tree_attention import tree_attention
from vllm_redrafter.triton_kernels.tree_attention_arguments import HEAD_DIMS
from vllm_redrafter.triton_kernels.tree_attention_tiles import (
    MIN_PART_KEYS,
    TILES,
    choose_parts,
    choose_tile,
    padded,
)

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")


def test_by_default_a_tensor_is_made_and_parts_are_chosen(launch: Callable[..., Launch]) -> None:
    """600 keys and one KV head are few programs with long loops: the keys are split."""
    batch = launch([(600, bushy(9))], Shape(kv_heads=1))
    assert choose_parts(1, 609, batch.device) > 1
    out = tree_attention(**batch.arguments())
    assert out.shape == batch.query.shape and out.dtype == batch.query.dtype
    assert_close(out[batch.rows].double().cpu(), batch.reference()[0], 1e-5)


def test_parts_are_chosen_for_the_fewest_requests_that_there_may_be(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph for many requests may serve one with a long context."""
    batch = launch([(300, bushy(9)), *[(0, [0])] * 5], Shape(kv_heads=2))
    counted = []

    def choose(programs: int, *args: Any) -> int:
        counted.append(programs)
        return choose_parts(programs, *args)

    monkeypatch.setattr(tree_attention_module, "choose_parts", choose)
    batch.check(min_requests=1)
    batch.check()
    assert counted == [2, 12]
    for wrong in (0, 7):
        with pytest.raises(ValueError, match="min_requests must be between 1 and 6"):
            batch(min_requests=wrong)


@pytest.mark.parametrize("max_keys", [1, 100, 1000, 100_000])
@pytest.mark.parametrize("programs", [1, 8, 5000])
def test_parts_hold_enough_keys_each_and_are_not_too_many(
    device: torch.device, programs: int, max_keys: int
) -> None:
    parts = choose_parts(programs, max_keys, device)
    assert 1 <= parts <= 64
    assert parts == 1 or parts * MIN_PART_KEYS <= max_keys
    assert programs < 5000 or parts == 1


@pytest.mark.parametrize(
    ("nodes", "group", "rows", "tiles"),
    [
        (1, 1, 16, 1),  # as few as a matrix instruction has
        (9, 1, 16, 1),
        (9, 4, 64, 1),  # 36 rows
        (9, 7, 64, 1),
        (9, 8, 128, 1),  # 72 rows: 128 either way
        (13, 7, 128, 1),
        (17, 4, 128, 1),
        (17, 8, 64, 3),  # 136 rows: 192 instead of 256
        (33, 1, 64, 1),
        (33, 4, 64, 3),  # 132 rows likewise
        (33, 7, 128, 2),
        (33, 8, 64, 5),
        (65, 4, 64, 5),
        (128, 8, 128, 8),
    ],
)
def test_few_rows_are_padding(nodes: int, group: int, rows: int, tiles: int) -> None:
    tile = choose_tile(nodes * group, 128, torch.bfloat16)
    assert tile.rows == rows
    assert padded(nodes * group, rows) == rows * tiles


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_tiles_are_what_triton_can_multiply(head_dim: int, dtype: torch.dtype) -> None:
    """`tl.dot` takes powers of two from 16 on; two warp groups have 256 threads' registers."""
    for rows in range(1, 1025):
        tile = choose_tile(rows, head_dim, dtype)
        assert tile.rows in (16, 32, 64, 128) and tile.keys in (16, 32, 64)
        accumulators = tile.rows * 2 ** (head_dim - 1).bit_length() / (32 * tile.num_warps)
        assert accumulators <= 64
        assert padded(rows, tile.rows) < rows + tile.rows


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_the_table_of_tiles_is_in_order_and_has_no_tile_in_vain(
    head_dim: int, dtype: torch.dtype
) -> None:
    tiles = TILES[dtype.itemsize, 2 ** (head_dim - 1).bit_length()]
    assert [tile.rows for tile in tiles] == sorted({tile.rows for tile in tiles})
    assert {choose_tile(rows, head_dim, dtype) for rows in range(1, 1025)} == set(tiles)
