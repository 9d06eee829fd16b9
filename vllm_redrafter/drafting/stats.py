# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, and what it accepts: counters that cost a clock reading each."""

from __future__ import annotations

from dataclasses import dataclass, fields
from time import perf_counter

import numpy as np
import numpy.typing as npt


@dataclass
class StepStats:
    """Sums since the last reset.

    Attributes:
        steps: engine steps that verified at least one request's draft.
        verifications: requests verified, summed over steps.
        drafted_tokens: tree nodes verified, roots not counted.
        sampled_tokens, expected_tokens: that the verifications output, and were expected to.
        matched_tokens, accepted_matched_tokens: verified nodes that continue the request's own
            text; earlier_tokens, accepted_earlier_tokens: an earlier answer.
        undrafted_steps: engine steps after which nothing was drafted.
        decoding_seconds, plain_seconds: of steps without prompts, and what plain ones would take.
        draft: seconds in beam search and tree building.
        forward: seconds in the target's forward pass, tree attention included.
        attention: seconds in tree attention.
        accept: seconds in sampling at the nodes and the walk.
        compact: seconds in moving KV rows.
    """

    steps: int = 0
    verifications: int = 0
    drafted_tokens: int = 0
    sampled_tokens: int = 0
    expected_tokens: float = 0.0
    matched_tokens: int = 0
    accepted_matched_tokens: int = 0
    earlier_tokens: int = 0
    accepted_earlier_tokens: int = 0
    undrafted_steps: int = 0
    decoding_seconds: float = 0.0
    plain_seconds: float = 0.0
    draft: float = 0.0
    forward: float = 0.0
    attention: float = 0.0
    accept: float = 0.0
    compact: float = 0.0

    def measure(self, part: str) -> _PartTimer:
        """For a `with`: adds the seconds that its body takes to the field named `part`."""
        return _PartTimer(self, part)

    def count(self, num_drafted: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """Count a step's drafts, 0 for a request without one, and its output: [R] integers each."""
        verified = num_drafted > 0
        self.steps += bool(verified.any())
        self.verifications += int(verified.sum())
        self.drafted_tokens += int(num_drafted.sum())
        self.sampled_tokens += int(num_sampled[verified].sum())

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, field.default)


class _PartTimer:
    """No generator, which takes longer: this runs in every step."""

    __slots__ = ("part", "started", "stats")

    def __init__(self, stats: StepStats, part: str) -> None:
        self.stats, self.part = stats, part

    def __enter__(self) -> None:
        self.started = perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = perf_counter() - self.started
        setattr(self.stats, self.part, getattr(self.stats, self.part) + seconds)
