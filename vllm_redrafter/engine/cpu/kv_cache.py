# SPDX-License-Identifier: Apache-2.0
"""Compaction of the CPU KV cache: the accepted path's rows move into the linear slots."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.engine.cpu.cache_layout import as_integers, cache_layout
from vllm_redrafter.engine.cpu.tree_sequences import COMPILED_THREADS
from vllm_redrafter.utils.compiled import Array, compiled

LayerStack = tuple[Array, Array]
"""Numbers [layers, blocks, KV heads, B * 2 * head size] of evenly spaced caches of one allocation,
as integers of their width; and [B, 2 * head size] int64, their places (`CacheLayout`)."""


def stack_layers(caches: Iterable[Tensor], isas: Mapping[int, str]) -> list[LayerStack]:
    """Caches of layers that are compacted at once; layers may share a cache.

    Args:
        caches: per layer [blocks, KV heads, block size, 2 * head size].
        isas: by the last size, the instruction set that caches are laid out for.
    """
    stacks = []
    for stack in _stacked(caches):
        block_size, both = stack.shape[-2:]
        layout = cache_layout(isas[both], both // 2, block_size, stack.dtype)
        stacks.append((as_integers(stack).numpy(), layout.places))
    return stacks


def _stacked(caches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Views [layers, blocks, KV heads, block size, 2 * head size]."""
    unique = sorted({c.data_ptr(): c for c in caches}.values(), key=lambda c: c.data_ptr())
    for _, same in groupby(unique, key=lambda c: (c.shape, c.stride(), c.dtype)):
        layers = list(same)
        steps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(layers)}
        first = layers[0]
        storage = first.untyped_storage().data_ptr()
        one_storage = all(c.untyped_storage().data_ptr() == storage for c in layers)
        if len(steps) == 1 and one_storage:
            step = steps.pop() // first.element_size()
            size, stride = (len(layers), *first.shape), (step, *first.stride())
            yield first.as_strided(size, stride, first.storage_offset())
        else:
            yield from (layer.unsqueeze(0) for layer in layers)


def compact(
    groups: Sequence[Iterable[LayerStack]], block_tables: Any, source: Tensor, destination: Tensor
) -> None:
    """Copy KV rows between slots, in the layers of all cache groups.

    Args:
        source: [N] int64 rows of the batch; none is an earlier destination.
        destination: [N] int64 rows, distinct.
    """
    # Torch shares rows out among threads; for few, one thread of our loop is faster.
    many = min(len(source), torch.get_num_threads()) > COMPILED_THREADS
    move = _move_reference if many else _move_rows
    for group, stacks in enumerate(groups):
        # `gpu` is where vLLM writes: its `cpu` twin is the same tensor only until the batch is
        # made anew, for several cache groups, and by 0.33 unless --block-size is given.
        slots = block_tables[group].slot_mapping.gpu
        read, written = (slots[rows].long().numpy() for rows in (source, destination))
        for numbers, places in stacks:
            move(numbers, places, read, written)


def _move_reference(numbers: Array, places: Array, source: Array, destination: Array) -> None:
    layers, _, heads, _ = (torch.arange(size) for size in numbers.shape)

    def at(slots: Array) -> tuple[Tensor, ...]:
        block, place = map(torch.from_numpy, np.divmod(slots, len(places)))
        # [layers, N, KV heads, 2 * head size]
        of_token = torch.from_numpy(places)[place].unsqueeze(1)
        return layers.view(-1, 1, 1, 1), block.view(-1, 1, 1), heads.view(-1, 1), of_token

    memory = torch.from_numpy(numbers)
    memory[at(destination)] = memory[at(source)]


@compiled
def _move_rows(numbers: Array, places: Array, source: Array, destination: Array) -> None:
    block_size = len(places)
    for layer in range(numbers.shape[0]):
        for head in range(numbers.shape[2]):
            for move in range(len(source)):
                read, write = source[move], destination[move]
                row = numbers[layer, read // block_size, head]
                to = numbers[layer, write // block_size, head]
                from_places, to_places = places[read % block_size], places[write % block_size]
                for number in range(len(from_places)):
                    to[to_places[number]] = row[from_places[number]]
