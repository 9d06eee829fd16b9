"""What a stopwatch found. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Timing:
    """Every repeat's microseconds."""

    microseconds: list[float]

    @property
    def median(self) -> float:
        return median(self.microseconds)
