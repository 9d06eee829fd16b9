"""What drafts take: the table that was measured at start-up, times what they took over it of late.

One factor for all searches for about so many requests. What a draft takes beyond the table, as
weights that have left the caches, it takes level by level, whatever is searched; which of two
searches takes longer the table knows better than a few drafts in the middle of other work do. With
a factor of its own for each, a search that was tried in a quiet moment would look cheaper than one
that does less, and one that was never tried the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vllm_redrafter.budget.costs import CostTable
from vllm_redrafter.budget.drift import CELLS, MEMORY, PRIOR, cell, settling_median
from vllm_redrafter.tree.policy import SearchShape

LATE = 1 / 64
"""How much of a draft is taken into the factor that numbers of requests not seen yet have."""


class DraftCosts:
    """Seconds of drafts: the table's, and what was seen of them since."""

    def __init__(self, costs: CostTable, shapes: Iterable[SearchShape], max_requests: int) -> None:
        """Begin with the table's.

        Args:
            costs: measured, of all widths among the `shapes`.
            shapes: the searches that may be asked for.
            max_requests: the largest batch.
        """
        self._table = {
            shape: [costs.draft_seconds(n, *shape) for n in range(max_requests + 1)]
            for shape in shapes
        }
        # By half octave of requests.
        self._latest = np.zeros((CELLS, MEMORY))
        self._seen = [0] * CELLS
        self._medians = [1.0] * CELLS
        self._everywhere, self._drafts = 1.0, 0

    def observe(self, shape: SearchShape, requests: int, seconds: float) -> None:
        """A draft by this search, for so many requests, took `seconds`."""
        at, factor = cell(requests), seconds / self._table[shape][requests]
        seen = self._seen[at]
        self._medians[at] = settling_median(self._latest[at], seen, factor)
        # The first one may have compiled something, or allocated: it does not count.
        if self._drafts:
            rate = max(LATE, 1 / self._drafts)
            self._everywhere += rate * (self._medians[at] - self._everywhere)
        self._seen[at] = seen + 1
        self._drafts += 1

    def usual(self, shape: SearchShape, requests: int) -> float | None:
        """What such a draft took of late; None where too few were seen to tell."""
        at = cell(requests)
        if self._seen[at] < MEMORY:
            return None
        return self._table[shape][requests] * self._medians[at]

    def seconds(self, shape: SearchShape, requests: int) -> float:
        """D of this search, for so many requests."""
        at = cell(requests)
        own = min(max(self._seen[at] - 1, 0), MEMORY)
        factor = (own * self._medians[at] + PRIOR * self._everywhere) / (own + PRIOR)
        return self._table[shape][requests] * factor
