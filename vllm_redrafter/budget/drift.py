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
kind, that leans on the kind that takes least for so many requests: what is believed to be as dear
as what is done already is never tried, and is not found to be cheaper. And on how the kind differed
from the others for other numbers of requests. What it took more, it takes by request: what was dear
for four requests (trees, of which each is attended to by itself) need not be tried for eight, and
for sixteen, to know that it is twice as dear there. What it took less (plain steps, behind which
nothing is walked or moved) it takes less here, too, as long as nothing was seen of it here: else
drafting would seem to pay for every new number of requests. What was seen long ago counts for less
and less.

The loops are compiled: the median's runs in every step, the others every few steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_redrafter.utils.compiled import compiled

MEMORY = 16
"""Steps that a median looks back at, of its kind, requests and size."""
PRIOR, SIZE_PRIOR = 2.0, 6.0
"""Steps of its own, after the first, that a median of a kind needs to count as much as the wider
one that it leans on; and that of a size, of which steps come in a row and share a disturbance."""
FORGOTTEN = 1024
"""Steps learned from after which what was seen of a size counts half."""
RENEWAL, EARLY_RENEWAL = 16, 4
"""Steps for which what was asked for once is kept; and while a size is new."""
CELLS = 32
"""Half octaves: up to 2^16."""
LEAST = 0.1
"""No step takes less than this share of what the table says."""

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.floating[Any]]


class Drift:
    """Seconds of steps: the table's, and what was seen of them since."""

    def __init__(self, tables: Sequence[Floats]) -> None:
        """Begin without an excess.

        Args:
            tables: by kind of step, as their costs move apart, the seconds that were measured of
                sizes 0, 1, 2..., the same for all kinds.
        """
        self._tables = [np.ascontiguousarray(table, dtype=np.float64) for table in tables]
        self._half_octaves = 2.0 * np.log2(np.maximum(np.arange(tables[0].shape[0]), 1))
        # By kind, half octave of requests, half octave of sizes.
        cells = (len(tables), CELLS, CELLS)
        self._latest = np.zeros((*cells, MEMORY))
        self._seen = np.zeros(cells, dtype=np.int64)
        self._medians = np.zeros(cells)
        self._weights = np.zeros(cells)
        self._observed = 0
        self._seen_at = np.zeros(cells, dtype=np.int64)
        # Until the next renewal: by kind and half octave of requests, weights and weighted sums;
        # and what was asked for.
        self._totals: tuple[Floats, Floats] | None = None
        self._kept: dict[tuple[int, int], Floats] = {}
        self._until_renewal = 0

    def observe(self, kind: int, requests: int, size: int, seconds: float) -> None:
        """A step of this kind and size, for so many requests, took `seconds`."""
        at = (kind, cell(requests), cell(size))
        seen = int(self._seen[at])
        self._seen[at] = seen + 1
        # The first step of its kind may have compiled something, or allocated: it does not count.
        self._weights[at] = min(seen, MEMORY)
        self._observed += 1
        self._seen_at[at] = self._observed
        excess = seconds - float(self._tables[kind][size])
        self._medians[at] = settling_median(self._latest[at], seen, excess)
        if seen < MEMORY:
            self._until_renewal = min(self._until_renewal, EARLY_RENEWAL)
        self._until_renewal -= 1
        if self._until_renewal < 0:
            self._kept.clear()
            self._totals = None
            self._until_renewal = RENEWAL

    def weight(self, kind: int, requests: int, size: int) -> float:
        """How many steps of this kind and about this size count at present."""
        return float(self._weights[kind, cell(requests), cell(size)])

    def steps(self, kind: int, requests: int) -> float:
        """How many steps of this kind count at present for about so many requests; of each size,
        the last ones."""
        return float(self._weights[kind, cell(requests)].sum())

    def times(self, kind: int, requests: int) -> int:
        """How many steps of this kind were ever seen, of any size, for about so many requests."""
        return int(self._seen[kind, cell(requests)].sum())

    def usual(self, kind: int, requests: int, size: int, least: int = MEMORY) -> float | None:
        """What steps of this kind and about this size took of late; None below `least` of them."""
        at = (kind, cell(requests), cell(size))
        if self._weights[at] < least:
            return None
        table = float(self._tables[kind][size])
        return max(table + float(self._medians[at]), LEAST * table)

    def doubt(self, kind: int, requests: int, size: int) -> float:
        """How far what such steps took of late may be off, as a share of it: see `median_error`.

        0 where few were seen: what may as well be cheap is tried.
        """
        error = median_error(self._latest[kind, cell(requests), cell(size)])
        usual = self.usual(kind, requests, size)
        return error / usual if usual is not None else 0.0

    def seconds(self, kind: int, requests: int) -> Floats:
        """Of steps of this kind, for so many requests, at each of the table's sizes."""
        key = (kind, cell(requests))
        if key not in self._kept:
            seen = (self._weights, self._medians, self._seen_at, self._observed)
            if self._totals is None:
                self._totals = _totals(*seen)
            excess = _leaning(*seen, *self._totals, *key)
            self._kept[key] = _with_excess(self._tables[kind], self._half_octaves, excess)
        return self._kept[key]


@compiled
def settling_median(latest: Floats, seen: int, value: float) -> float:
    """Of MEMORY values the median; of fewer, down to the lower quartile.

    Args:
        latest: [MEMORY], the last ones of those `seen` before; the new one takes its place.
        seen, value: how many there were, and the new one.
    """
    latest[seen % MEMORY] = value
    known = min(seen + 1, MEMORY)
    rank = int((known - 1) * (0.25 + 0.25 * known / MEMORY))
    return float(np.sort(latest[:known])[rank])


@compiled
def median_error(values: Floats) -> float:
    """The standard error of the median of n values that lie as those of a normal distribution do.

    It is sqrt(pi / 2) sigma / sqrt(n), with sigma from what lies between the quartiles, which a few
    steps that were interrupted do not move.
    """
    n = values.shape[0]
    ordered = np.sort(values)
    sigma = (ordered[(3 * n) // 4] - ordered[n // 4]) / 1.349
    return float(math.sqrt(math.pi / 2.0 / n) * sigma)


@compiled
def _faded(weight: float, age: int) -> float:
    """What a weight counts so many steps after the last that it stands for."""
    return weight * 2.0 ** (-age / FORGOTTEN)


@compiled
def _totals(
    weights: Floats, medians: Floats, seen_at: Array, observed: int
) -> tuple[Floats, Floats]:
    """Weights and weighted sums of the medians, over all sizes: [kinds, CELLS] each."""
    totals, sums = np.zeros(weights.shape[:2]), np.zeros(weights.shape[:2])
    for kind in range(weights.shape[0]):
        for requests in range(weights.shape[1]):
            for size in range(weights.shape[2]):
                if weights[kind, requests, size] > 0.0:
                    age = observed - seen_at[kind, requests, size]
                    weight = _faded(weights[kind, requests, size], age)
                    totals[kind, requests] += weight
                    sums[kind, requests] += weight * medians[kind, requests, size]
    return totals, sums


@compiled
def _leaning(
    weights: Floats,
    medians: Floats,
    seen_at: Array,
    observed: int,
    totals: Floats,
    sums: Floats,
    kind: int,
    requests: int,
) -> Floats:
    """By half octave of sizes, the excess that is expected.

    Args:
        weights, medians, seen_at, observed: [kinds, CELLS, CELLS], of what was seen, and when.
        totals, sums: see `_totals`.
        kind, requests: which kind, and the half octave of how many requests.
    """
    least = _least(totals, sums, kind, requests)
    mean = (sums[kind, requests] + PRIOR * least) / (totals[kind, requests] + PRIOR)
    excess = np.empty(weights.shape[2])
    for size in range(weights.shape[2]):
        age = observed - seen_at[kind, requests, size]
        own = _faded(weights[kind, requests, size], age)
        excess[size] = (own * medians[kind, requests, size] + SIZE_PRIOR * mean) / (
            own + SIZE_PRIOR
        )
    return excess


@compiled
def _least(totals: Floats, sums: Floats, kind: int, requests: int) -> float:
    """The excess of a kind, by what was seen of others and for other numbers of requests."""
    kinds, cells = totals.shape
    here, dearer, cheaper = np.inf, 0.0, 0.0
    for at in range(cells):
        others = np.inf
        for other in range(kinds):
            if other != kind and totals[other, at] > 0.0:
                others = min(others, sums[other, at] / totals[other, at])
        if at == requests:
            here = others
        if others < np.inf and totals[kind, at] > 0.0:
            more = sums[kind, at] - totals[kind, at] * others
            # What a kind takes more it takes by request; what it takes less may be by step.
            ratio = 2.0 ** ((requests - at) / 2)
            dearer += max(more, 0.0) * ratio
            cheaper += min(more, 0.0) * min(ratio, 1.0)
    own = totals[kind].sum()
    if totals[kind, requests] > 0.0:
        here = min(here, sums[kind, requests] / totals[kind, requests])
        cheaper = 0.0
    if here < np.inf:
        return float(here + (dearer + cheaper) / (own + PRIOR))
    usual = sums.sum() / (totals.sum() + PRIOR)
    return float((sums[kind].sum() + PRIOR * usual) / (own + PRIOR))


@compiled
def _with_excess(table: Floats, half_octaves: Floats, excess: Floats) -> Floats:
    """The table's seconds, and the excess [CELLS] interpolated at each size's half octaves."""
    seconds = np.empty(table.shape[0])
    for size in range(table.shape[0]):
        at = min(int(half_octaves[size]), CELLS - 2)
        above = min(half_octaves[size] - at, 1.0)
        expected = table[size] + (1.0 - above) * excess[at] + above * excess[at + 1]
        seconds[size] = max(expected, LEAST * table[size])
    return seconds


@cache
def cell(size: int) -> int:
    """The half octave of a number of requests, or of rows."""
    return min(round(2.0 * math.log2(max(size, 1))), CELLS - 1)
