"""Batches that are smaller for a moment: a request has ended, and the next one is on its way.

Where nothing is drafted for N requests, drafts may pay for the N - 1 that are left. But what is
drafted for them is verified when the next request has come, in one pass with its prompt, for as
many requests as it did not pay for.
"""

from __future__ import annotations

DIP = 4
"""Steps for which a smaller batch may be a dip. It takes a step or two until a client that waits
for an answer has it, and its next request has come."""


class Dips:
    """Of one engine's batches."""

    def __init__(self) -> None:
        self._steps = 0

    def in_dip(self, smaller: bool) -> bool:
        """May the batch grow again at once? To be asked once in each step.

        Args:
            smaller: than the last one that was planned for.
        """
        self._steps = self._steps + 1 if smaller else 0
        return 0 < self._steps <= DIP
