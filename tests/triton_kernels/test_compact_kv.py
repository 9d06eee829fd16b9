# SPDX-License-Identifier: Apache-2.0
"""The accepted rows move, bit by bit, as if all were read before any is written; no other does."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from redrafter_testing.algorithm.tree_batches import GARBAGE, strided
from redrafter_testing.gpu.triton_interpreter import Memory
from vllm_redrafter.triton_kernels.compact_kv import CacheTable, compact_kv, gather_path

FP8 = torch.float8_e4m3fn


def naive_compact_kv(
    caches: Sequence[Tensor],
    path: Tensor,
    num_sampled: Tensor,
    row_start: Tensor,
    slot_mapping: Tensor,
) -> None:
    """`compact_kv` by loops, on [blocks, block_size, KV heads, head_dim] caches."""
    for cache in caches:
        block_size = cache.shape[1]
        before = cache.clone()
        for request, count in enumerate(num_sampled.tolist()):
            first = int(row_start[request])
            for depth in range(count):
                source = int(slot_mapping[first + int(path[request, depth])])
                destination = int(slot_mapping[first + depth])
                row = before[source // block_size, source % block_size]
                cache[destination // block_size, destination % block_size] = row


@dataclass(frozen=True)
class Caches:
    """K and V of some layers, [blocks, block_size, KV heads, head_dim] each, of random bytes.

    Attributes:
        layout: `NHD` or `HND`, each cache a tensor of its own; `one tensor` for K and V of a layer
            in one, `one allocation` for those of all layers.
    """

    layers: int = 1
    blocks: int = 6
    block_size: int = 4
    heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.bfloat16
    layout: str = "NHD"

    def make(self, device: torch.device) -> list[Tensor]:
        """The same bytes each time."""
        generator = torch.Generator().manual_seed(0)
        item = torch.empty(0, dtype=self.dtype).element_size()
        size = (self.blocks, self.block_size, self.heads, self.head_dim)

        def random_bytes(*shape: int) -> Tensor:
            shape = (*shape[:-1], shape[-1] * item)
            tensor = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            return tensor.to(device).view(self.dtype)

        if self.layout == "NHD":
            return [random_bytes(*size) for _ in range(2 * self.layers)]
        if self.layout == "HND":
            size = (size[0], size[2], size[1], size[3])
            return [random_bytes(*size).transpose(1, 2) for _ in range(2 * self.layers)]
        if self.layout == "one tensor":
            both = [random_bytes(size[0], 2, *size[1:]) for _ in range(self.layers)]
            return [cache for tensor in both for cache in tensor.unbind(1)]
        assert self.layout == "one allocation"
        return [cache for x in random_bytes(self.layers, 2, *size) for cache in x]


def step(
    device: torch.device, paths: Sequence[Sequence[int]], caches: Caches, *, seed: int = 0
) -> dict[str, Tensor]:
    """What `compact_kv` takes besides the caches, with garbage where it must not look.

    Request r has one row per node up to the last on its path, each with a slot of its own.
    """
    rng = random.Random(seed)
    slots = rng.sample(range(caches.blocks * caches.block_size), sum(p[-1] + 1 for p in paths))
    width = max(map(len, paths)) + 2
    slot_mapping, row_start = [-1], []
    for path in paths:
        row_start.append(len(slot_mapping))
        slot_mapping += [slots.pop() for _ in range(path[-1] + 1)]
        slot_mapping.append(-1)
    rows = [[*path, *[GARBAGE] * (width - len(path))] for path in paths]
    return {
        "path": torch.tensor([*rows, [GARBAGE] * width], dtype=torch.int32, device=device),
        "num_sampled": torch.tensor([len(p) for p in paths], dtype=torch.int32, device=device),
        "row_start": torch.tensor([*row_start, GARBAGE], dtype=torch.int32, device=device),
        "slot_mapping": torch.tensor(slot_mapping, dtype=torch.int64, device=device),
    }


def whole_storage(tensor: Tensor) -> Tensor:
    """All bytes of the allocation, whatever the tensor's view of it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@pytest.fixture(scope="module")
def compact(device: torch.device, memory: Memory | None) -> Callable[..., None]:
    """Compacts, and compares every byte with those that loops over clones leave."""

    def run(caches: Caches, paths: Sequence[Sequence[int]], **options: Any) -> None:
        arguments = step(device, paths, caches, **options)
        found, expected = caches.make(device), caches.make(torch.device("cpu"))
        table = CacheTable.of(found)
        if memory is None:
            compact_kv(table, **arguments)
        else:
            with memory.allow(found):
                compact_kv(table, **arguments)
        naive_compact_kv(expected, **{name: value.cpu() for name, value in arguments.items()})
        for cache, right in zip(found, expected, strict=True):
            assert torch.equal(whole_storage(cache).cpu(), whole_storage(right))

    return run


# Most rows on the long paths are both a source and a destination.
some_paths = st.sets(st.integers(1, 20), max_size=8).map(
    lambda nodes: [0, *sorted(nodes)]
) | st.sampled_from([[0, 1, 2, *range(4, 20)], [0, *range(2, 128)], [0, 1, *range(3, 128, 5)]])


@settings(deadline=None, max_examples=25)
@given(
    paths=st.lists(some_paths, min_size=1, max_size=4),
    caches=st.builds(
        Caches,
        layers=st.integers(1, 3),
        blocks=st.just(130),
        heads=st.sampled_from([1, 3]),
        head_dim=st.sampled_from([1, 3, 8, 700]),
        block_size=st.sampled_from([4, 48]),
        dtype=st.sampled_from([torch.bfloat16, torch.float32, FP8]),
        layout=st.sampled_from(["NHD", "HND", "one tensor", "one allocation"]),
    ),
    seed=st.integers(0, 100),
)
def test_whatever_the_paths_the_rows_are_those_of_the_loop(
    compact: Callable[..., None], paths: list[list[int]], caches: Caches, seed: int
) -> None:
    compact(caches, paths, seed=seed)


def test_a_table_keeps_no_cache_alive(device: torch.device) -> None:
    """vLLM frees the cache that it profiled with while the table of it is still there."""
    caches = Caches(layers=3).make(device)
    storages = [StorageWeakRef(cache.untyped_storage()) for cache in caches]
    table = CacheTable.of(caches)
    assert not any(storage.expired() for storage in storages)
    del caches
    assert all(storage.expired() for storage in storages)
    assert table.bases.shape == (6,)


def test_a_cache_may_be_larger_than_2_to_the_31_words(
    device: torch.device, memory: Memory | None
) -> None:
    """2 GiB of address space; only the rows that move take memory (all of it on a GPU)."""
    block_size, row = 16, 63
    blocks = 2**31 // (block_size * row) + 2
    cache = torch.empty(blocks, block_size, 1, row, dtype=torch.uint8, device=device)
    last = blocks * block_size - 1
    slots = torch.tensor([last - 40, last - 30, last - 1, last])
    index = (slots // block_size, slots % block_size)
    rows = torch.arange(4 * row, dtype=torch.uint8).view(4, 1, row).to(device)
    cache[index] = rows
    with memory.allow([cache]) if memory else nullcontext():
        compact_kv(
            CacheTable.of([cache]),
            torch.tensor([[0, 2, 3]], dtype=torch.int32, device=device),
            torch.tensor([3], dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            slots.to(device),
        )
    assert torch.equal(cache[index], rows[[0, 2, 3, 3]])


def test_caches_that_differ_or_are_strided_are_refused(device: torch.device) -> None:
    first, *_ = Caches().make(device)
    for caches, named in (
        ([first, first[:3]], r"^caches\[1\]: "),
        ([first, first.view(torch.float16)], r"^caches\[1\]: "),
        ([first, first.to("meta")], r"^caches\[1\]: "),
        ([], "^caches: expected at least one"),
        ([strided(first)], "^caches: the last dimension must be contiguous"),
    ):
        with pytest.raises(ValueError, match=named):
            CacheTable.of(caches)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.int32, ()), (torch.int64, ()), (torch.bfloat16, (1100,))]
)
def test_a_step_s_rows_of_accepted_nodes_become_the_first(
    device: torch.device, dtype: torch.dtype, size: tuple[int, ...]
) -> None:
    """Of tokens, positions, and states wider than what a program moves; no other row changes."""
    paths, starts = [[0, 1, 2, 5], [0, 2, 3, -1], [0, -1, -1, -1], [0, 3, -1, -1]], [0, 6, 12, 14]
    of_path = (torch.tensor(part, dtype=torch.int32, device=device) for part in (paths, starts))
    of_step = [torch.randint(99, (20, *size), device=device).to(dtype) for _ in range(2)]
    sources = torch.tensor([0, 1, 2, 5, 4, 5, 6, 8, 9, *range(9, 15), 17, *range(16, 20)])
    expected = [rows[sources.to(device)] for rows in of_step]
    gather_path(*of_path, of_step)
    assert all(map(torch.equal, of_step, expected))
