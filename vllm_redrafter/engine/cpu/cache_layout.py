# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's attention for CPUs keeps a token's K and V in a block, found by writing to one.

Per block and KV head, the first half of the memory is K, the second half V. The order within each
half depends on instruction set, dtype and vLLM's version.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from vllm._custom_ops import cpu_attn_reshape_and_cache

from vllm_redrafter.utils.compiled import Array
from vllm_redrafter.utils.errors import ConfigError

UNIT = 32
"""Tokens that vLLM's kernels multiply at once; its block sizes on a CPU are multiples of it."""

WORD_BYTES = 8  # units are copied in words
DIGIT = 256  # every dtype of a cache holds whole numbers below it exactly


@dataclass(frozen=True)
class CacheLayout:
    """The order of K and V in a block of B tokens, per KV head.

    Attributes:
        places: [B, 2 * head size] int64, where a token's K and V are among the block's numbers.
        places_in_unit: [UNIT, 2 * head size] int64, likewise in a block of `UNIT` tokens.
        rows: of K, and of V. A block's are [rows, B / UNIT, numbers]; along the middle are its
            units of `UNIT` tokens, each of which is [rows, 1, numbers] in a block of its own.
    """

    places: Array
    places_in_unit: Array
    rows: tuple[int, int]


@cache
def cache_layout(isa: str, head_size: int, block_size: int, dtype: torch.dtype) -> CacheLayout:
    """Let vLLM write numbers into a block, and find them again.

    ConfigError: units cannot be copied out of such blocks.
    """
    order = _order(isa, head_size, block_size, dtype)
    order_of_unit = _order(isa, head_size, UNIT, dtype)
    halves = zip(order, order_of_unit, strict=True)
    key_rows, value_rows = (_rows(*half, dtype.itemsize) for half in halves)
    if not (key_rows and value_rows):
        raise ConfigError(
            f"vLLM's CPU attention keeps K and V in an order out of which ReDrafter cannot copy "
            f"{UNIT} tokens (instruction set {isa!r}, head size {head_size}, block size "
            f"{block_size}, {dtype}); choose another --dtype, or run without --spec-model, and "
            "report this message"
        )
    in_block, in_unit = (_places(of, head_size) for of in (order, order_of_unit))
    return CacheLayout(in_block, in_unit, (key_rows, value_rows))


def as_integers(kv: Tensor) -> Tensor:
    """The numbers of a cache, [..., B, 2 * head size], as integers of their width: [..., n]."""
    integers = kv.view(torch.int32 if kv.dtype == torch.float32 else torch.int16)
    return integers.view(*kv.shape[:-2], -1)  # The same memory; `flatten` might copy it.


def _order(isa: str, head_size: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """[2, B * head size] int64: of K and V, [B, head size], the number that lies at each place."""
    count = block_size * head_size
    numbers = torch.arange(count).view(block_size, 1, head_size)
    order = torch.zeros(2, count, dtype=torch.int64)
    weight = 1
    while weight < count:
        digits = (numbers // weight % DIGIT).to(dtype)
        block = torch.zeros(1, 1, 2 * block_size, head_size, dtype=dtype)
        slots = torch.arange(block_size)
        cpu_attn_reshape_and_cache(digits, digits, *block.chunk(2, dim=2), slots, isa)
        order += weight * block.view(2, count).long()
        weight *= DIGIT
    return order


def _rows(order: Tensor, order_of_unit: Tensor, itemsize: int) -> int:
    """Rows of units in K or V of a block (`CacheLayout.rows`); 0 where units lie otherwise."""
    if not all(torch.equal(of.sort()[0], torch.arange(len(of))) for of in (order, order_of_unit)):
        return 0  # Numbers are not stored as they are, each once.
    places = order.argsort()
    # [units, UNIT * head size]: from where the numbers of a unit are copied, in their order there.
    sources = places.view(-1, len(order_of_unit))[:, order_of_unit]
    rows = 1 + int((sources[0].diff() != 1).sum())
    if len(order_of_unit) % rows or len(order_of_unit) // rows * itemsize % WORD_BYTES:
        return 0
    in_rows = torch.arange(len(order)).view(rows, len(sources), -1).transpose(0, 1)
    return rows if torch.equal(sources, in_rows.reshape_as(sources)) else 0


def _places(order: Tensor, head_size: int) -> Array:
    keys, values = order.argsort(dim=1).view(2, -1, head_size)
    places: Array = torch.cat([keys, values + keys.numel()], dim=1).numpy()
    return places
