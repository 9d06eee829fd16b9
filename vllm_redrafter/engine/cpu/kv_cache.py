"""Compaction of the CPU KV cache: the accepted path's rows move into the linear slots."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import Any

from torch import Tensor

AMX_LANES, AMX_PAIR = 16, 2
"""AMX multiplies tiles of rows of 16 pairs of bfloat16 numbers, a pair along what is summed over:
entries of a head for Q K, tokens for the weights times V."""


def key_value_views(cache: Tensor, amx: bool = False) -> tuple[Tensor, Tensor]:
    """K and V of a cache in one of vLLM's CPU layouts (`v1/attention/backends/cpu_attn.py`).

    Per block and KV head, the first half of the memory is K, the second half V. With B the block
    size and D the head size:

    | | K | V |
    | --- | --- | --- |
    | AVX and others | [D, B] | [B, D] |
    | AMX | [B / 16, D / 2, 16 tokens, 2] | [D / 16, B / 2, 16 entries, 2] |

    Args:
        cache: [..., KV heads, block size, 2 * head size], the last two dimensions contiguous.
        amx: it is laid out for AMX.

    Returns:
        Both views, [..., KV heads, and what the table says].
    """
    block_size, head_size = cache.shape[-2], cache.shape[-1] // 2
    flat = cache.flatten(-2)
    before, half = flat.shape[:-1], block_size * head_size
    keys, values = flat[..., :half], flat[..., half:]
    if amx:
        tile = AMX_LANES, AMX_PAIR
        return (
            keys.view(*before, block_size // AMX_LANES, head_size // AMX_PAIR, *tile),
            values.view(*before, head_size // AMX_LANES, block_size // AMX_PAIR, *tile),
        )
    return keys.view(*before, head_size, block_size), values.view(*before, block_size, head_size)


def key_value_rows(cache: Tensor, amx: bool = False) -> tuple[Tensor, Tensor]:
    """K and V by token, both [..., KV heads, block size, head size]; copies where AMX's."""
    keys, values = key_value_views(cache, amx)
    if not amx:
        return keys.transpose(-1, -2), values
    shape = *cache.shape[:-1], cache.shape[-1] // 2
    # [B/16, D/2, 16, 2] -> [B/16, 16, D/2, 2]; [D/16, B/2, 16, 2] -> [B/2, 2, D/16, 16].
    by_token = values.movedim(-4, -2).transpose(-1, -3)
    return keys.transpose(-2, -3).reshape(shape), by_token.reshape(shape)


def stack_layers(caches: Iterable[Tensor]) -> list[Tensor]:
    """View the caches of many layers as few tensors, so that one operation serves all layers.

    vLLM lays the layers of a group evenly into one allocation; layers that are not evenly spaced
    are left apart.

    Args:
        caches: per layer [blocks, KV heads, block size, 2 * head size]; a cache that several
            layers share may be given more than once.

    Returns:
        Views [layers, blocks, KV heads, block size, 2 * head size].
    """
    unique = sorted({c.data_ptr(): c for c in caches}.values(), key=lambda c: c.data_ptr())
    stacks: list[Tensor] = []
    for _, same in groupby(unique, key=lambda c: (c.shape, c.stride(), c.dtype)):
        layers = list(same)
        steps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(layers)}
        first = layers[0]
        storage = first.untyped_storage().data_ptr()
        one_storage = all(c.untyped_storage().data_ptr() == storage for c in layers)
        if len(steps) == 1 and one_storage:
            step = steps.pop() // first.element_size()
            size, stride = (len(layers), *first.shape), (step, *first.stride())
            stacks.append(first.as_strided(size, stride, first.storage_offset()))
        else:
            stacks.extend(layer.unsqueeze(0) for layer in layers)
    return stacks


def compact(
    stacks: Iterable[Tensor], source: Tensor, destination: Tensor, amx: bool = False
) -> None:
    """Copy KV rows between slots, in all layers; every source is read before anything is written.

    Args:
        stacks: see `stack_layers`.
        source: [N] int64 slots (block * block size + offset).
        destination: [N] int64 slots, distinct; may overlap `source`.
        amx: the caches are laid out for AMX.
    """
    for stack in stacks:
        block_size = stack.shape[3]
        read, write = _at(source, block_size, amx), _at(destination, block_size, amx)
        for view, from_here, to_here in zip(key_value_views(stack, amx), read, write, strict=True):
            view[to_here] = view[from_here]


def _at(slots: Tensor, block_size: int, amx: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Where these slots' K and V are in the views of a stack."""
    block, token, every = slots // block_size, slots % block_size, slice(None)
    if not amx:
        return (every, block, every, every, token), (every, block, every, token)
    group, lane = token // AMX_LANES, token % AMX_LANES
    pair, half = token // AMX_PAIR, token % AMX_PAIR
    return (
        (every, block, every, group, every, lane),
        (every, block, every, every, pair, every, half),
    )
