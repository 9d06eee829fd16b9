"""When to learn anew how probable nodes are to be accepted (`calibration.py`).

A new drafter is to be known soon, as what it is worth decides whether it is used at all.
"""

from __future__ import annotations

STEPS, NODES = 4, 16
"""Verifying steps, and nodes judged in them, from one refit to the next, where the host knows how
many nodes were judged: another kind of text is known soon, too."""
FIRST_AFTER, AFTER = 8, 100
"""Verifying steps before the first refit, where the host does not wait for the device to say how
many nodes were judged; and between two refits, as in vLLM's `acceptance_estimator.py`, once each
has waited twice as long as the one before."""


class RefitsByNodes:
    """Of the CPU engine, where a refit takes microseconds."""

    def __init__(self) -> None:
        self._steps = self._nodes = 0

    def due(self, nodes: int) -> bool:
        """Shall there be a refit now? To be asked once per verifying step, of which so many nodes
        were judged."""
        self._steps, self._nodes = self._steps + 1, self._nodes + nodes
        if self._steps < STEPS or self._nodes < NODES:
            return False
        self._steps = self._nodes = 0
        return True


class RefitsBySteps:
    """Of the CUDA engine, where a refit is a dozen launches."""

    def __init__(self) -> None:
        self._steps, self._after = 0, FIRST_AFTER

    def due(self) -> bool:
        """Shall there be a refit now? To be asked once per verifying step."""
        self._steps += 1
        if self._steps < self._after:
            return False
        self._steps, self._after = 0, min(2 * self._after, AFTER)
        return True
