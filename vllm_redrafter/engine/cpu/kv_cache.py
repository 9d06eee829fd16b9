"""Compaction of the CPU KV cache: the accepted path's rows move into the linear slots."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise

from torch import Tensor


def key_value_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a cache in vLLM's CPU layout (`v1/attention/backends/cpu_attn.py`).

    Per block and KV head, the first half of the memory is K, *transposed*, the second half V.

    Args:
        cache: [..., KV heads, block size, 2 * head size], the last two dimensions contiguous.

    Returns:
        (K [..., KV heads, head size, block size], V [..., KV heads, block size, head size]),
        both views.
    """
    block_size, head_size = cache.shape[-2], cache.shape[-1] // 2
    flat = cache.flatten(-2)
    half = block_size * head_size
    keys = flat[..., :half].view(*flat.shape[:-1], head_size, block_size)
    values = flat[..., half:].view(*flat.shape[:-1], block_size, head_size)
    return keys, values


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


def compact(stacks: Iterable[Tensor], source: Tensor, destination: Tensor) -> None:
    """Copy KV rows between slots, in all layers; every source is read before anything is written.

    Args:
        stacks: see `stack_layers`.
        source: [N] int64 slots (block * block size + offset).
        destination: [N] int64 slots, distinct; may overlap `source`.
    """
    for stack in stacks:
        block_size = stack.shape[3]
        source_at = (source // block_size, source % block_size)
        destination_at = (destination // block_size, destination % block_size)
        keys, values = key_value_views(stack)
        keys[:, destination_at[0], :, :, destination_at[1]] = keys[
            :, source_at[0], :, :, source_at[1]
        ]
        values[:, destination_at[0], :, destination_at[1]] = values[
            :, source_at[0], :, source_at[1]
        ]
