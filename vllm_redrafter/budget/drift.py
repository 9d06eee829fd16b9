"""How far a machine's costs have moved from the table that was measured at start-up.

The table is measured without context and in a quiet moment; the steps' own times know better. A
step's deviation is the logarithm of its time over the table's. It is averaged by kind of step and
by size (half octaves of rows); where few steps were seen, the average leans on that of the kind,
and this on that of all steps: a choice between two sizes shall not turn on one noisy step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

MEMORY = 64.0
"""Steps that an average reaches back, of its kind and size."""
PRIOR = 8.0
"""Steps of its own that an average needs to count as much as the wider one that it leans on."""
LARGEST = math.log(3.0)
"""A step that deviates by more was disturbed, and counts as this much."""
SIZES = 32
"""Half octaves: up to 2^16 rows."""

Floats = npt.NDArray[np.floating[Any]]


class Drift:
    """Factors by which the table is off, by kind of step and number of rows."""

    def __init__(self, kinds: int, sizes: npt.ArrayLike) -> None:
        """Begin without a deviation.

        Args:
            kinds: of steps, whose costs move apart: 0 to `kinds` - 1.
            sizes: those whose factors will be asked for.
        """
        self._sums = np.zeros((kinds, SIZES))
        self._weights = np.zeros((kinds, SIZES))
        self._at = _half_octaves(sizes)
        self._factors: dict[int, Floats] = {}

    def observe(self, kind: int, size: int, measured: float, expected: float) -> None:
        """A step of this kind and size took `measured` seconds where the table has `expected`."""
        deviation = min(max(math.log(measured / expected), -LARGEST), LARGEST)
        at = (kind, _cell(size))
        kept = 1.0 - 1.0 / MEMORY
        self._sums[at] = kept * self._sums[at] + deviation
        self._weights[at] = kept * self._weights[at] + 1.0
        self._factors.clear()

    def weight(self, kind: int, size: int) -> float:
        """How many steps of this kind and about this size count at present."""
        return float(self._weights[kind, _cell(size)])

    def factors(self, kind: int) -> Floats:
        """What to multiply the table's seconds with, at each of the sizes."""
        if kind not in self._factors:
            self._factors[kind] = np.interp(self._at, np.arange(SIZES), self._averages(kind))
        return self._factors[kind]

    def _averages(self, kind: int) -> Floats:
        every = self._sums.sum() / max(self._weights.sum(), 1.0)
        sums, weights = self._sums[kind], self._weights[kind]
        of_kind = (sums.sum() + PRIOR * every) / (weights.sum() + PRIOR)
        return np.exp((sums + PRIOR * of_kind) / (weights + PRIOR))


def _cell(size: int) -> int:
    return min(round(2.0 * math.log2(max(size, 1))), SIZES - 1)


def _half_octaves(sizes: npt.ArrayLike) -> Floats:
    return np.asarray(2.0 * np.log2(np.maximum(sizes, 1)))
