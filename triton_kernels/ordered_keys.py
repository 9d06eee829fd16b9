# SPDX-License-Identifier: Apache-2.0
"""Floats as integers of the same order, alone or with an index behind them.

The bits of a float, read as an integer, are in the floats' order where the sign is plus, and in
the reverse order where it is minus; turning the negative ones' other bits around puts all in one
order:

    key(x) = bits(x)                    for x >= 0
    key(x) = bits(x) ^ 0x7fffffff       for x < 0;       x < y  <=>  key(x) < key(y)

With an index in the lower 32 bits, the largest of many integers is the largest float, and of equal
ones the first: a reduction finds both in one pass, and ties are decided.
"""

import triton
import triton.language as tl

LAST_INDEX = tl.constexpr(0x7FFFFFFF)
"""No index is larger. As the index of what is missing, it comes behind everything there is."""

BEHIND_ALL = tl.constexpr(-(2**31))
"""A key below that of every number, minus infinity included."""


@triton.jit
def key_of(x):
    """fp32 -> int32 in the same order; both zeros have one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(key):
    """int32, made by `key_of` -> fp32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ordered_pair(x, index):
    """(fp32, int32 of at least 0) -> int64: larger for larger x, of equal ones for lower index.

    index ^ 0x7fffffff is 0x7fffffff - index, the same in the other order.
    """
    return (key_of(x).to(tl.int64) << 32) | (index ^ LAST_INDEX).to(tl.int64)


@triton.jit
def float_of_pair(pair):
    """What `ordered_pair` was given: x."""
    return _float_of((pair >> 32).to(tl.int32))


@triton.jit
def index_of_pair(pair):
    """What `ordered_pair` was given: the index."""
    return (pair & LAST_INDEX).to(tl.int32) ^ LAST_INDEX


@triton.jit
def nth_largest(keys, nth, BITS: tl.constexpr):
    """The nth largest of int32 keys within [-2^(BITS-1), 2^(BITS-1)), by halving that range.

    Each step counts the keys in its upper half: BITS sums over the block instead of a sort.
    Where there are fewer keys than `nth`, the lowest value of the range.
    """
    from_zero = tl.sum((keys >= 0).to(tl.int32), axis=0)
    found = tl.where(from_zero >= nth, 0, -(2 ** (BITS - 1)))
    for step in range(BITS - 1):
        upper = found + (tl.full([], 1, tl.int32) << (BITS - 2 - step))
        enough = tl.sum((keys >= upper).to(tl.int32), axis=0) >= nth
        found = tl.where(enough, upper, found)
    return found
