# SPDX-License-Identifier: Apache-2.0
"""The tiles of rows and keys that the attention kernel works on."""

import pytest
import torch

from redrafter_testing.gpu.tree_attention_launch import DTYPES, names
from vllm_redrafter.triton_kernels.tree_attention_arguments import HEAD_DIMS
from vllm_redrafter.triton_kernels.tree_attention_tiles import TILES, choose_tile, padded


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


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
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
