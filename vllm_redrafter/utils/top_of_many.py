# SPDX-License-Identifier: Apache-2.0
"""The largest of many values, and where they stand."""

import numpy as np

from vllm_redrafter.utils.compiled import Array, compiled

FOLDS = 32
"""Values of a column that `top_of_many` looks at together."""


@compiled
def top_of_many(values: Array, best: Array, index: Array) -> int:
    """As `top`, where comparing many values one by one would take too long.

    Values stand in columns, FOLDS to each. Of N columns with the largest maxima each has a value at
    least as large as the least of these maxima: what is below that is not among the N largest. The
    maxima are found by vector instructions, and few columns are left to look through.
    """
    most, size = best.shape[0], values.shape[0]
    columns = size // FOLDS
    if columns < 2 * most:
        return top(values, best, index)
    maxima = np.full(columns, -np.inf, dtype=values.dtype)
    for start in range(0, size, columns):
        fold = values[start : start + columns]
        for column in range(fold.shape[0]):
            maxima[column] = _larger(maxima[column], fold[column])
    if top(maxima, best, index) < most:
        return top(values, best, index)
    least = best[most - 1]
    kept = np.flatnonzero(maxima >= least)
    candidates = np.empty(kept.shape[0] * (FOLDS + 1), dtype=np.int64)
    count = 0
    for start in range(0, size, columns):
        for column in kept:
            # The last fold may be shorter.
            if start + column < size and values[start + column] >= least:
                candidates[count] = start + column
                count += 1
    found = top(values[candidates[:count]], best, index)
    index[:found] = candidates[index[:found]]
    return found


@compiled
def _larger(a: float, b: float) -> float:
    """Not `max`, which numba does value by value, as it asks for NaN: here that is not larger."""
    return b if b > a else a


@compiled
def top(values: Array, best: Array, index: Array) -> int:
    """Write the N largest values into `best` [N] and their places into `index` [N] int64.

    Descending; of equal ones the first comes first. NaN and -inf are left out. Returns how many
    there are. A value below the N-th best so far costs one comparison.
    """
    most = best.shape[0]
    count = 0
    least = -np.inf
    for at in range(values.shape[0]):
        value = values[at]
        if value > least:
            place = min(count, most - 1)
            while place > 0 and best[place - 1] < value:
                best[place], index[place] = best[place - 1], index[place - 1]
                place -= 1
            best[place], index[place] = value, at
            count = min(count + 1, most)
            if count == most:
                least = best[most - 1]
    return count
