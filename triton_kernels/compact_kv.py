# SPDX-License-Identifier: Apache-2.0
"""Compaction on the device: the accepted path's K and V rows move to the linear slots.

Node path[d] of a request was computed in linear slot path[d] and belongs into slot d. The path's
nodes grow in number and path[d] >= d, so going through d = 1, 2, ... never overwrites a row that
is still to be read: slot d is written after all of path[0..d], and path[e] > d for e > d unless
path[e] = e. Each program moves one stripe of bytes of a row through all depths, in that order.

Rows are moved as raw words, whatever the cache's dtype. All layers go in one launch: their base
addresses are in a table. Likewise, `gather_path` moves rows of a step's own tensors, for a drafter
that reads the accepted tokens and their states again, as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require, require_layout

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))


@triton.jit
def _compact(
    bases,  # [caches] int64 addresses of [blocks, BLOCK_SIZE, HEADS, WORDS_PER_HEAD] words
    path,  # [R, T] int32
    num_sampled,  # [R] int32
    row_start,  # [R] int32
    slot_mapping,  # [rows] int64
    example,  # a word, for its type
    stride_path,
    stride_block,
    stride_slot,
    stride_head,
    HEADS: tl.constexpr,
    WORDS_PER_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request, one cache (K or V of a layer), one stripe of a row's words."""
    request = tl.program_id(0)
    base = tl.load(bases + tl.program_id(1)).to(tl.pointer_type(example.dtype.element_ty))
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_word = word < HEADS * WORDS_PER_HEAD
    within = (word // WORDS_PER_HEAD) * stride_head + word % WORDS_PER_HEAD
    first_row = tl.load(row_start + request)
    for depth in range(1, tl.load(num_sampled + request)):
        node = tl.load(path + request * stride_path + depth)
        if node != depth:
            source = tl.load(slot_mapping + first_row + node).to(tl.int64)
            destination = tl.load(slot_mapping + first_row + depth).to(tl.int64)
            source_at = source // BLOCK_SIZE * stride_block + source % BLOCK_SIZE * stride_slot
            destination_at = (
                destination // BLOCK_SIZE * stride_block + destination % BLOCK_SIZE * stride_slot
            )
            row = tl.load(base + source_at + within, mask=is_word, other=0)
            tl.store(base + destination_at + within, row, mask=is_word)
        # A later step's slot may be this one's source, and Triton may give loads and stores to
        # other threads, each of which has come this far only then.
        tl.debug_barrier()


@dataclass(frozen=True)
class CacheTable:
    """Where the K and V caches of all layers are; made once, at start-up.

    It holds none of them: vLLM frees the cache that it profiled with, and a view would keep it.

    Attributes:
        bases: [caches] int64 addresses.
        word: a single integer, of the type in which rows are moved.
        shape: of each cache in words, [blocks, block_size, heads, words].
        strides: between its blocks, slots and heads, in words.
    """

    bases: Tensor
    word: Tensor
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]

    @classmethod
    def of(cls, caches: Sequence[Tensor]) -> Self:
        """K and V caches, [blocks, block_size, KV heads, head_dim] each, of one shape and strides.

        They must outlive the table's last use.

        Raises:
            ValueError: they differ in shape, strides, dtype or device, or a row's last dimension
                is not contiguous.
        """
        require(len(caches) > 0, "caches: expected at least one")
        first = caches[0]
        for index, cache in enumerate(caches):
            same = (cache.shape, cache.stride(), cache.dtype, cache.device) == (
                first.shape,
                first.stride(),
                first.dtype,
                first.device,
            )
            require(
                cache.dim() == 4 and same,
                f"caches[{index}]: {list(cache.shape)} {cache.dtype} with strides "
                f"{cache.stride()} differs from caches[0]",
            )
        require(first.stride(3) == 1, "caches: the last dimension must be contiguous")
        in_words = first.view(_widest_word(caches))
        blocks, block_size, heads, words = in_words.shape
        between_blocks, between_slots, between_heads, _ = in_words.stride()
        return cls(
            bases=torch.tensor([c.data_ptr() for c in caches], device=first.device),
            word=in_words.new_empty(1),
            shape=(blocks, block_size, heads, words),
            strides=(between_blocks, between_slots, between_heads),
        )


def _widest_word(caches: Sequence[Tensor]) -> torch.dtype:
    """The widest integer that all strides, the row length and the addresses are multiples of."""
    first = caches[0]
    item = first.element_size()
    offsets = [int(n) * item for n in (*first.stride()[:3], first.shape[3])]
    offsets += [c.data_ptr() for c in caches]
    return next(
        dtype
        for size, dtype in _WORDS
        if size >= item and all(offset % size == 0 for offset in offsets)
    )


def compact_kv(
    table: CacheTable, path: Tensor, num_sampled: Tensor, row_start: Tensor, slot_mapping: Tensor
) -> None:
    """Move the accepted rows of all requests, in all caches; a path in place moves nothing.

    Args:
        table: the caches.
        path: [R, T] int32 from `accept_path`: the nodes accepted, root first.
        num_sampled: [R] int32: how many entries of `path` count.
        row_start: [R] int32: the row of each request's root among the step's rows.
        slot_mapping: [rows] int64: the cache slot of each row.
    """
    requests, int32 = num_sampled.shape[0], torch.int32
    require_layout(
        table.bases.device,
        path=(path, int32, (requests, path.shape[-1])),
        num_sampled=(num_sampled, int32, (1,)),
        row_start=(row_start, int32, (requests,)),
        slot_mapping=(slot_mapping, torch.int64, (1,)),
    )
    _, block_size, heads, words = table.shape
    block = min(1024, triton.next_power_of_2(heads * words))
    _compact[(requests, table.bases.shape[0], triton.cdiv(heads * words, block))](
        table.bases,
        path,
        num_sampled,
        row_start,
        slot_mapping,
        table.word,
        path.stride(0),
        *table.strides,
        HEADS=heads,
        WORDS_PER_HEAD=words,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _gather_path(
    path,  # [R, T] int32
    row_start,  # [R] int32
    rows,  # [rows, SIZE], changed
    T: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request, one stripe of a row."""
    request = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = rows + tl.load(row_start + request).to(tl.int64) * SIZE + column
    for depth in range(1, T):
        node = tl.load(path + request * T + depth)
        if node > depth:
            row = tl.load(first + node * SIZE, mask=column < SIZE)
            tl.store(first + depth * SIZE, row, mask=column < SIZE)
        tl.debug_barrier()  # as above


def gather_path(path: Tensor, row_start: Tensor, of_step: Sequence[Tensor]) -> None:
    """Make accepted nodes' rows the first of their trees', in one launch for each tensor.

    Args:
        path: [R, T] int32, the nodes walked, root first, then -1.
        row_start: [>= R] int32, the row of each request's root.
        of_step: [rows] or [rows, H] each, of any dtype; changed.
    """
    (requests, nodes), int32 = path.shape, torch.int32
    of_paths = {"path": (path, int32, path.shape), "row_start": (row_start, int32, (requests,))}
    for rows in of_step:
        require_layout(path.device, **of_paths, of_step=(rows, rows.dtype, rows.shape))
        size = rows[0].numel()
        block = min(1024, triton.next_power_of_2(size))
        _gather_path[(requests, triton.cdiv(size, block))](
            path, row_start, rows, T=nodes, SIZE=size, BLOCK=block
        )
