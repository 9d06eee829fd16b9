# SPDX-License-Identifier: Apache-2.0
"""A CUDA event's part where there is no CUDA: the work is done when the call returns."""

from time import perf_counter
from typing import Any, Self


class HostEvent:
    """`torch.cuda.Event`, where vLLM's stand-in for it has no time to tell: costs are measured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        self._seconds = perf_counter()

    def elapsed_time(self, end: Self) -> float:
        """Milliseconds, as CUDA events give them."""
        return 1000 * (end._seconds - self._seconds)

    def wait(self, stream: Any = None) -> None:
        """What was recorded is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None
