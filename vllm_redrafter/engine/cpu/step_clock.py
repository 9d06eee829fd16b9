# SPDX-License-Identifier: Apache-2.0
"""How long the engine takes from step to step, where steps can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter


class StepClock:
    """Time between the ends of steps, vLLM's scheduling and output included.

    While a request is unfinished, the engine goes from one step to the next at once. After a step
    that left none, it may have waited for work, and the time says nothing.
    """

    def __init__(self) -> None:
        self._ended = 0.0
        self._requests: list[str] = []

    def lap(self, request_ids: Sequence[str]) -> float | None:
        """End a step.

        Args:
            request_ids: the step's.

        Returns:
            Seconds since the last step's end; None where this step's requests are not among that
            one's.
        """
        before, self._requests = self._requests, list(request_ids)
        started, self._ended = self._ended, perf_counter()
        # Mostly they are the same, in the same order, which is found sooner.
        same = before == self._requests or set(before).issuperset(self._requests)
        return self._ended - started if same else None
