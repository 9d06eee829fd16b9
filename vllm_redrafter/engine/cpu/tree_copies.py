"""K and V copied out of the cache's blocks into matrices of float32, in one compiled loop each.

For few threads: torch gathers first and widens then, each through memory of its own, and whole
blocks where a context ends in one. With many threads torch's copies share the work, and this does
not. About numba see `ranking.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.compiled import compiled
from vllm_redrafter.engine.cpu.tree_plan import Array

COMPILED_THREADS = 3
"""Up to as many, one thread of a compiled loop is taken for faster than all of torch's copies, of
which one thread is less than half as fast."""

SHIFTS = {torch.float32: 0, torch.bfloat16: 16}
"""By dtype of the cache, where its bits are in those of a float32: bfloat16 is the upper half."""

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def are_compiled(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype is copied so; one that is laid out for AMX is not."""
    return dtype in SHIFTS and torch.get_num_threads() <= COMPILED_THREADS


def copy_keys(kv_cache: Tensor, block_ids: Array, num_slots: int, keys: Array) -> None:
    """K of some blocks of each request.

    Args:
        kv_cache: [blocks, KV heads, block size, 2 * head size]; each block's K half is
            [head size, block size] (`kv_cache.key_value_views`).
        block_ids: [R, B] int64.
        num_slots: of the B * block size of each request, how many are copied.
        keys: [R * KV heads, head size, B * block size] int32, the bits of float32, written.
    """
    _copy_keys(_bits(kv_cache), block_ids, num_slots, SHIFTS[kv_cache.dtype], keys)


def copy_values(kv_cache: Tensor, block_ids: Array, num_slots: int, values: Array) -> None:
    """V: as `copy_keys`, of the V halves [block size, head size].

    Args:
        values: [R * KV heads, B * block size, head size] int32, the bits of float32, written.
    """
    _copy_values(_bits(kv_cache), block_ids, num_slots, SHIFTS[kv_cache.dtype], values)


def _bits(kv_cache: Tensor) -> Array:
    bits: Array = kv_cache.view(INTEGERS[kv_cache.dtype]).numpy()
    return bits


@compiled
def _copy_keys(cache: Array, block_ids: Array, num_slots: int, shift: int, keys: Array) -> None:
    requests, blocks = block_ids.shape
    heads, block_size, size = cache.shape[1], cache.shape[2], keys.shape[1]
    for r in range(requests):
        for head in range(heads):
            for block in range(blocks):
                first = block * block_size
                slots = min(block_size, num_slots - first)
                half = cache[block_ids[r, block], head].ravel()
                for entry in range(size):
                    row = half[entry * block_size : entry * block_size + slots]
                    _widen(row, shift, keys[r * heads + head, entry, first : first + slots])


@compiled
def _copy_values(cache: Array, block_ids: Array, num_slots: int, shift: int, values: Array) -> None:
    requests, blocks = block_ids.shape
    heads, block_size, size = cache.shape[1], cache.shape[2], values.shape[2]
    for r in range(requests):
        for head in range(heads):
            for block in range(blocks):
                first = block * block_size
                slots = min(block_size, num_slots - first)
                halves = cache[block_ids[r, block], head].ravel()
                half = halves[block_size * size : (block_size + slots) * size]
                _widen(half, shift, values[r * heads + head, first : first + slots].ravel())


@compiled
def _widen(narrow: Array, shift: int, wide: Array) -> None:
    for i in range(narrow.shape[0]):
        wide[i] = np.int32(narrow[i]) << np.int32(shift)


def rehearse_copies() -> None:
    """Let numba compile now, and not in the first step."""
    wide = np.zeros((1, 1, 1), dtype=np.int32)
    for dtype in SHIFTS:
        cache, ids = torch.zeros(1, 1, 1, 2, dtype=dtype), np.zeros((1, 1), dtype=np.int64)
        copy_keys(cache, ids, 1, wide)
        copy_values(cache, ids, 1, wide)
