"""K and V by token, out of the layout for AMX."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_redrafter.engine.cpu.kv_cache import key_value_rows
from vllm_redrafter.engine.cpu.tree_tiles import unpack, unpack_reference

BLOCK_SIZE, KV_HEADS, HEAD_SIZE, NUM_BLOCKS = 32, 2, 48, 9
UNTOUCHED = 7.0


@settings(deadline=None)  # the first call compiles
@given(
    block_ids=st.lists(
        st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=3, max_size=3), min_size=1, max_size=4
    ),
    behind=st.sampled_from([0, 16]),
)
def test_keys_and_values_are_unpacked_by_token(block_ids: list[list[int]], behind: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE
    cache = torch.randn(shape, generator=generator).bfloat16()
    ids = np.array(block_ids)
    blocks = ids.shape[1]
    num_slots = blocks * BLOCK_SIZE - behind
    sizes = 2, len(ids), KV_HEADS, blocks * BLOCK_SIZE, HEAD_SIZE
    found, by_torch = (torch.full(sizes, UNTOUCHED).bfloat16() for _ in range(2))
    unpack(cache.view(torch.int32).numpy(), ids, num_slots, found.view(torch.int32).numpy())
    unpack_reference(cache, ids, by_torch)
    # [blocks, KV heads, block size, head size], each
    halves = torch.stack(key_value_rows(cache, amx=True))
    expected = halves[:, ids].transpose(2, 3).reshape(sizes)
    assert torch.equal(by_torch, expected)
    assert torch.equal(found[..., :num_slots, :], expected[..., :num_slots, :])
    assert (found[..., num_slots:, :] == UNTOUCHED).all()
