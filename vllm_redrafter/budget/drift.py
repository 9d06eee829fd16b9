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

    def __init__(self, kinds: int) -> None:
        """Kinds of steps, whose costs move apart: 0 to `kinds` - 1."""
        self._sums = np.zeros((kinds, SIZES))
        self._weights = np.zeros((kinds, SIZES))
        self._factors = np.ones((kinds, SIZES))

    def observe(self, kind: int, size: int, measured: float, expected: float) -> None:
        """A step of this kind and size took `measured` seconds where the table has `expected`."""
        deviation = min(max(math.log(measured / expected), -LARGEST), LARGEST)
        at = (kind, min(int(_half_octaves(size) + 0.5), SIZES - 1))
        kept = 1.0 - 1.0 / MEMORY
        self._sums[at] = kept * self._sums[at] + deviation
        self._weights[at] = kept * self._weights[at] + 1.0
        self._refresh()

    def factors(self, kind: int, sizes: npt.ArrayLike) -> Floats:
        """What to multiply the table's seconds with, at each of the sizes."""
        return np.interp(_half_octaves(sizes), np.arange(SIZES), self._factors[kind])

    def _refresh(self) -> None:
        of_kind = self._sums.sum(axis=1), self._weights.sum(axis=1)
        every = of_kind[0].sum() / max(of_kind[1].sum(), 1.0)
        kinds = (of_kind[0] + PRIOR * every) / (of_kind[1] + PRIOR)
        sizes = (self._sums + PRIOR * kinds[:, None]) / (self._weights + PRIOR)
        self._factors = np.exp(sizes)


def _half_octaves(sizes: npt.ArrayLike) -> Floats:
    return np.asarray(2.0 * np.log2(np.maximum(sizes, 1)))
