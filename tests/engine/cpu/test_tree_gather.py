"""K and V, gathered piece by piece; and the memory that all of it uses again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_redrafter.engine.cpu import tree_gather
from vllm_redrafter.engine.cpu.kv_cache import key_value_views
from vllm_redrafter.engine.cpu.tree_gather import LayerShape, PieceSizes, Workspace, pieces

BLOCK_SIZE, HEADS, SIZE = 16, 2, 8
SHAPE = LayerShape(kv_heads=HEADS, group=3, head_size=SIZE, dtype=torch.float32)
BLOCK_BYTES = 4 * HEADS * BLOCK_SIZE * SIZE


@pytest.mark.parametrize("at_once", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_slots_are_gathered_whatever_a_piece_holds(
    at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(tree_gather, "PIECE_BYTES", 2 * at_once * BLOCK_BYTES)
    cache = torch.randn(9, HEADS, BLOCK_SIZE, 2 * SIZE).to(dtype)
    block_ids, num_slots = np.array([[4, 1, 7, 0, 2], [3, 8, 5, 6, 0]]), 4 * BLOCK_SIZE + 7
    made = list(pieces(block_ids, BLOCK_SIZE, num_slots, SHAPE._replace(dtype=dtype), Workspace()))
    assert len(made) == -(-5 // at_once)
    # Copies: the memory of a piece is the next one's.
    keys = torch.cat([piece.keys(cache).clone() for piece in made], dim=2)
    values = torch.cat([piece.values(cache).clone() for piece in made], dim=1)
    in_blocks, of_blocks = key_value_views(cache[torch.from_numpy(block_ids)].float())
    expected_keys = in_blocks.permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 1)
    expected_values = of_blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    assert torch.equal(keys, expected_keys[..., :num_slots])
    assert torch.equal(values, expected_values[:, :num_slots])


def test_more_threads_gather_more_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_gather, "PIECE_BYTES", BLOCK_BYTES)
    made = []
    for threads in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        ids = np.zeros((1, 8), dtype=np.int64)
        made.append(len(list(pieces(ids, BLOCK_SIZE, 128, SHAPE, Workspace()))))
    assert made == [8, 4, 2]


def made(workspace: Workspace, slots: int) -> tree_gather.GatheredMatrices:
    sizes = PieceSizes(SHAPE, 1, -(-slots // BLOCK_SIZE), BLOCK_SIZE, slots)
    return workspace.matrices(tree_gather.GatheredMatrices, sizes)


def test_v_takes_the_memory_of_k() -> None:
    matrices = made(Workspace(), 40)
    assert matrices.keys.data_ptr() == matrices.values.data_ptr()


def test_steps_of_one_size_share_their_matrices_until_the_memory_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_gather, "KEPT_SIZES", 2)
    workspace = Workspace()
    first = made(workspace, 100)
    assert made(workspace, 100) is first
    assert made(workspace, 50) is not first
    # A third size: the two before it are forgotten.
    made(workspace, 20)
    second = made(workspace, 100)
    assert second is not first
    assert second.keys.data_ptr() == first.keys.data_ptr()
    made(workspace, 200)
    assert made(workspace, 100).keys.data_ptr() != second.keys.data_ptr()


def test_memory_of_several_dtypes_is_apart() -> None:
    workspace = Workspace()
    half, single = workspace.take("x", 4, dtype=torch.float16), workspace.take("x", 4)
    assert (half.dtype, single.dtype) == (torch.float16, torch.float32)
