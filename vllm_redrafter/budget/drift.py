"""What steps take beyond the table that was measured at start-up.

The table knows the target's passes, without context and in a quiet moment. The steps' own times
know the rest: what vLLM and this engine do around a pass, which for a small target is most of a
step; attention over the context. (What slows all steps down is taken out before: `pace.py`.) A
step's excess is its time less the table's. The median of the last ones is kept, by kind of step, by
number of requests and by size (half octaves each): a disturbance adds more to one step than a
choice turns on, so a mean would speak against what was tried last; and a step's own parts vary
(what is compacted, how far a walk goes), which a lower quantile would not see, steps of trees
varying most. Of few steps it is a lower quantile than the median: the first ones of a kind are
slow, and would speak against it for long.

Where few steps were seen of a size, it leans on what all sizes of the kind take for so many
requests: a choice between two sizes shall not turn on one noisy step. And where few were seen of a
kind, that leans on the kind that takes least for so many requests, or on what it takes itself for
others: what is believed to be as dear as what is done already is never tried, and is not found to
be cheaper. For the same reason what was seen long ago counts for less and less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

MEMORY = 16
"""Steps that a median looks back at, of its kind, requests and size."""
PRIOR = 2.0
"""Steps of its own, after the first, that a median needs to count as much as the wider one that
it leans on."""
FORGOTTEN = 1024
"""Steps after which what was seen of a size counts half."""
RENEWAL, EARLY_RENEWAL = 16, 4
"""Steps for which what was asked for once is kept; and while a size is new."""
CELLS = 32
"""Half octaves: up to 2^16."""
LEAST = 0.1
"""No step takes less than this share of what the table says."""

Floats = npt.NDArray[np.floating[Any]]


class Drift:
    """Seconds of steps: the table's, and what was seen of them since."""

    def __init__(self, tables: Sequence[Floats]) -> None:
        """Begin without an excess.

        Args:
            tables: by kind of step, as their costs move apart, the seconds that were measured of
                sizes 0, 1, 2..., the same for all kinds.
        """
        self._tables = tables
        self._half_octaves = 2.0 * np.log2(np.maximum(np.arange(tables[0].shape[0]), 1))
        # By kind, half octave of requests, half octave of sizes.
        cells = (len(tables), CELLS, CELLS)
        self._latest = np.zeros((*cells, MEMORY))
        self._seen = np.zeros(cells, dtype=np.int64)
        self._medians = np.zeros(cells)
        self._weights = np.zeros(cells)
        self._observed = 0
        self._seen_at = np.zeros(cells, dtype=np.int64)
        self._kept: dict[tuple[int, int], Floats] = {}
        self._until_renewal = 0

    def observe(self, kind: int, requests: int, size: int, seconds: float) -> None:
        """A step of this kind and size, for so many requests, took `seconds`."""
        at = (kind, cell(requests), cell(size))
        latest, seen = self._latest[at], self._seen[at]
        latest[seen % MEMORY] = seconds - self._tables[kind][size]
        self._seen[at] = seen + 1
        # The first step of its kind may have compiled something, or allocated: it does not count.
        self._weights[at] = min(seen, MEMORY)
        self._observed += 1
        self._seen_at[at] = self._observed
        self._medians[at] = _settling_median(latest[: seen + 1])
        if seen < MEMORY:
            self._until_renewal = min(self._until_renewal, EARLY_RENEWAL)
        self._until_renewal -= 1
        if self._until_renewal < 0:
            self._kept.clear()
            self._until_renewal = RENEWAL

    def weight(self, kind: int, requests: int, size: int) -> float:
        """How many steps of this kind and about this size count at present."""
        return float(self._weights[kind, cell(requests), cell(size)])

    def steps(self, kind: int, requests: int) -> float:
        """How many steps of this kind count at present for about so many requests; of each size,
        the last ones."""
        return float(self._weights[kind, cell(requests)].sum())

    def usual(self, kind: int, requests: int, size: int, least: int = MEMORY) -> float | None:
        """What steps of this kind and about this size took of late; None below `least` of them."""
        at = (kind, cell(requests), cell(size))
        if self._weights[at] < least:
            return None
        table = float(self._tables[kind][size])
        return max(table + float(self._medians[at]), LEAST * table)

    def seconds(self, kind: int, requests: int) -> Floats:
        """Of steps of this kind, for so many requests, at each of the table's sizes."""
        key = (kind, cell(requests))
        if key not in self._kept:
            excess = np.interp(self._half_octaves, np.arange(CELLS), self._leaning(*key))
            table = self._tables[kind]
            self._kept[key] = np.maximum(table + excess, LEAST * table)
        return self._kept[key]

    def _leaning(self, kind: int, requests: int) -> Floats:
        """By half octave of sizes, the excess that is expected."""
        ages = self._observed - self._seen_at[:, requests]
        weights = self._weights[:, requests] * np.exp2(-ages / FORGOTTEN)
        medians = self._medians[:, requests]
        # By kind. No dot products: BLAS has threads, and waits for them.
        weight, sums = weights.sum(axis=1), (weights * medians).sum(axis=1)
        seen = weight > 0
        least = self._elsewhere(kind)
        if seen.any():
            others = (sums[seen] / weight[seen]).min()
            least = min(least, others) if self._weights[kind].any() else others
        mean = (sums[kind] + PRIOR * least) / (weight[kind] + PRIOR)
        own = weights[kind]
        return np.asarray((own * medians[kind] + PRIOR * mean) / (own + PRIOR))

    def _elsewhere(self, kind: int) -> float:
        """The excess of this kind for other numbers of requests, leaning on that of all kinds."""
        mean = 0.0
        for cells in (np.s_[:], np.s_[kind]):
            weights = self._weights[cells]
            mean = ((weights * self._medians[cells]).sum() + PRIOR * mean) / (weights.sum() + PRIOR)
        return float(mean)


def _settling_median(values: Floats) -> float:
    """Of MEMORY values the median; of fewer, down to the lower quartile."""
    rank = int((len(values) - 1) * (0.25 + 0.25 * min(len(values) / MEMORY, 1.0)))
    return float(np.partition(values, rank)[rank])


@cache
def cell(size: int) -> int:
    """The half octave of a number of requests, or of rows."""
    return min(round(2.0 * math.log2(max(size, 1))), CELLS - 1)
