# SPDX-License-Identifier: Apache-2.0
"""How the attention kernels split keys and rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from redrafter_testing.algorithm.tree_batches import bushy, chain
from redrafter_testing.gpu.memory_pool import MemoryPool
from redrafter_testing.gpu.tree_attention_launch import DTYPES, Launch, Shape, names
from vllm_redrafter.triton_kernels import tree_attention as tree_attention_module
from vllm_redrafter.triton_kernels import tree_attention_plan
from vllm_redrafter.triton_kernels.tree_attention_arguments import HEAD_DIMS
from vllm_redrafter.triton_kernels.tree_attention_plan import (
    LONG_CONTEXT_PARTS,
    MIN_KEYS,
    MOST_PARTS,
    PART_BYTES,
    KeySplit,
    plan_split,
)
from vllm_redrafter.triton_kernels.tree_attention_tiles import choose_tile, padded

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")


@pytest.fixture
def gpu_of_132(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many multiprocessors as an H100 and an H200 have."""
    monkeypatch.setattr(tree_attention_plan, "multiprocessors", lambda device: 132)


@pytest.mark.usefixtures("gpu_of_132")
@pytest.mark.parametrize(
    ("requests", "max_keys", "parts", "even_parts"),
    [
        (1, 100, 1, 1),
        (1, 4096, 16, 16),
        (1, 32768, 32, 32),  # 33 would fill the GPU
        (8, 32768, 8, 4),
        (33, 32768, LONG_CONTEXT_PARTS, 1),
        (64, 131072, LONG_CONTEXT_PARTS, 1),
    ],
)
def test_few_programs_and_long_contexts_have_parts(
    device: torch.device, requests: int, max_keys: int, parts: int, even_parts: int
) -> None:
    """8 KV heads; 33 requests fill the GPU, and one of them may be long."""
    split = plan_split(8 * requests, max_keys, 1000, device)
    assert (split.parts, split.even_parts) == (parts, even_parts)


@pytest.mark.usefixtures("gpu_of_132")
@pytest.mark.parametrize("bytes_per_part", [1000, PART_BYTES // 3, 2 * PART_BYTES])
@pytest.mark.parametrize("max_keys", [1, 300, 5000, 10**6])
@pytest.mark.parametrize("programs", [1, 50, 10**5])
def test_parts_are_not_too_many(
    device: torch.device, programs: int, max_keys: int, bytes_per_part: int
) -> None:
    split = plan_split(programs, max_keys, bytes_per_part, device)
    assert 1 <= split.even_parts <= split.parts <= MOST_PARTS
    assert split.parts == 1 or split.parts * MIN_KEYS <= max_keys
    assert split.parts == 1 or split.parts * bytes_per_part <= PART_BYTES


@pytest.mark.parametrize(
    ("split", "window", "context_lens", "parts"),
    [
        # Half a context each, but not less than 64 keys, and not more than 96.
        (KeySplit(8, 2, 64, 96), 0, [0, 60, 185, 400], [1, 2, 2, 5]),
        (KeySplit(8, 1, 64, 96), 0, [20, 91, 92, 700], [1, 1, 2, 8]),
        # The windows begin at keys 91 and 1961, in tiles of 32 that begin at 64 and 1952.
        (KeySplit(8, 8, 32, 96), 40, [20, 130, 2000], [1, 3, 2]),
    ],
)
def test_each_request_has_the_parts_that_its_own_length_asks_for(
    launch: Callable[..., Launch],
    monkeypatch: pytest.MonkeyPatch,
    split: KeySplit,
    window: int,
    context_lens: list[int],
    parts: list[int],
) -> None:
    """Parts that a request does not have are neither written nor read: they stay NaN."""
    monkeypatch.setattr(tree_attention_module, "plan_split", lambda **_: split)
    batch = launch([(n, chain(5)) for n in context_lens], Shape(kv_heads=1, group=1))
    pool = MemoryPool()
    with pool:
        batch.check(sliding_window=window)
    (part_lse,) = (new for new in pool.tensors if new.shape == (len(batch.query), 1, split.parts))
    written = part_lse[batch.rows, 0].isfinite().view(len(parts), 5, -1).any(dim=1)
    assert written.sum(dim=1).tolist() == parts


def test_parts_are_planned_for_the_fewest_requests_and_the_most_keys_that_there_may_be(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph for many requests may serve one with a long context; a window hides most of it."""
    batch = launch([(300, bushy(9)), *[(0, [0])] * 5], Shape(kv_heads=2))
    counted = []

    def plan(programs: int, max_keys: int, **others: Any) -> KeySplit:
        counted.append((programs, max_keys))
        return plan_split(programs, max_keys, **others)

    monkeypatch.setattr(tree_attention_module, "plan_split", plan)
    batch.check(min_requests=1)
    batch.check()
    batch.check(sliding_window=50)
    assert counted == [(2, 309), (12, 309), (12, 59)]
    for wrong in (0, 7):
        with pytest.raises(ValueError, match="min_requests must be between 1 and 6"):
            batch(min_requests=wrong)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_tiles_are_what_triton_can_multiply(head_dim: int, dtype: torch.dtype) -> None:
    """`tl.dot` takes powers of two from 16 on; two warp groups have 256 threads' registers."""
    for rows in range(1, 1025):
        tile = choose_tile(rows, head_dim, dtype)
        assert tile.rows in (16, 32, 64, 128) and tile.keys in (16, 32, 64)
        assert tile.rows * 2 ** (head_dim - 1).bit_length() / (32 * tile.num_warps) <= 64
        assert padded(rows, tile.rows) < rows + tile.rows
