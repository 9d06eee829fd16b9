# SPDX-License-Identifier: Apache-2.0
"""What a step costs: a table that is measured at start-up, corrected by the steps' own times."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_redrafter.budget.choice import Floats
from vllm_redrafter.tree.policy import SearchShape

KINDS = DRAFT, PLAIN, CHAINS, TREES = range(4)
"""Drafts, and the kinds of steps that costs distinguish: trees take tree attention."""
MEMORY = 16
"""Samples that a factor is the median of."""
OUTDATED = 512
"""Steps of chains after which what trees took is forgotten: it depends on their contexts."""


class DraftCost(NamedTuple):
    """Seconds of a draft for so many requests."""

    requests: int
    beam_width: int
    beam_length: int
    seconds: float


@dataclass(frozen=True)
class CostTable:
    """Measured costs of drafting and of verification, where they were measured.

    Attributes:
        draft: searches of one level and of the longest length for each width; a level costs as
            much as another. Of no level: matches alone.
        verify: (rows, seconds) of steps that verify, or decode plainly, in ascending order.
    """

    draft: tuple[DraftCost, ...]
    verify: tuple[tuple[int, float], ...]

    def draft_seconds(self, requests: int, beam_width: int, beam_length: int) -> float:
        """D of a width that was measured: interpolated over requests and lengths."""
        curves = self._draft_curves[beam_width]
        lengths = sorted(curves)
        at = [float(_curve_at(curves[length], requests)) for length in lengths]
        return float(_curve_at((np.array(lengths, np.float64), np.array(at)), beam_length))

    def verify_seconds(self, rows: npt.ArrayLike) -> Floats:
        """V of any numbers of rows: interpolated, beyond the last entry by the last slope."""
        return _curve_at(self._verify_curve, rows)

    @cached_property
    def _draft_curves(self) -> dict[int, dict[int, tuple[Floats, Floats]]]:
        curves: dict[int, dict[int, tuple[Floats, Floats]]] = {}
        for width, length in {entry[1:3] for entry in self.draft}:
            # Whatever searches as much or more.
            no_less = [e for e in self.draft if e.beam_width >= width and e.beam_length >= length]
            curves.setdefault(width, {})[length] = _curve(
                (size, min(e.seconds for e in no_less if e.requests >= size))
                for size, *shape, _ in self.draft
                if shape == [width, length]
            )
        return curves

    @cached_property
    def _verify_curve(self) -> tuple[Floats, Floats]:
        return _curve(self.verify)


def _curve(points: Iterable[tuple[int, float]]) -> tuple[Floats, Floats]:
    """Ascending sizes, and seconds that never fall: less work does not take more time.

    Disturbances only add to what is measured, so of two times that are out of order the shorter
    one, of the larger size, is believed; so is the shorter one of the same size.
    """
    by_size = dict(sorted(points, reverse=True))
    sizes, seconds = np.array(sorted(by_size.items()), dtype=np.float64).T
    return sizes, np.minimum.accumulate(seconds[::-1])[::-1]


def _curve_at(curve: tuple[Floats, Floats], size: npt.ArrayLike) -> Floats:
    """Linear interpolation; beyond the last point by the last slope, never below 0."""
    sizes, seconds = curve
    at = np.asarray(size, dtype=np.float64)
    values = np.interp(at, sizes, seconds)
    if sizes.shape[0] > 1:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        values = values + np.maximum(at - sizes[-1], 0.0) * max(slope, 0.0)
    return np.asarray(values)


class StepTimes:
    """Seconds of steps and drafts: the table's, corrected by what was seen of them since.

    The table knows the target's passes, without context; not what vLLM does around them, nor
    attention over the context. A kind of step takes so many seconds more. Where it takes less, the
    table was measured in a busy moment, and all of it is so many times too dear. A draft takes so
    many times as long. All this is for about so many requests, and the least disturbed word on it
    is a median. No cost can become 0 or less.

    What the best arm takes longer once its correction is known, all others would take longer as
    well: the machine is slower for a while, or contexts are longer. The others are learned while
    they are explored, compared with the steps around them. Only ratios of costs count.

    Attributes:
        table: what was measured at start-up.
        pace: what steps take at present over what their corrections say.
    """

    def __init__(self, table: CostTable, most_rows: int) -> None:
        """Begin with the table's, of up to so many rows."""
        self.table, self.pace = table, 1.0
        self._verify = table.verify_seconds(np.arange(most_rows + 1))
        # Above 0: seconds more than the table's; below: as a share of them, and above -1.
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._paces = deque([self.pace], MEMORY)
        # By number of requests: steps of chains since one of trees.
        self._without_trees: dict[int, int] = {}

    def stepped(self, kind: int, requests: int, rows: int, seconds: float, explores: bool) -> None:
        """A step of this kind took `seconds`, its draft's left out; of the best arm, or another."""
        at = bucket(requests)
        if kind == CHAINS:
            self._without_trees[at] = self._without_trees.get(at, 0) + 1
            if self._without_trees[at] % OUTDATED == 0:
                self._samples.pop((TREES, at), None)
        elif kind == TREES:
            self._without_trees[at] = 0
        samples = self._samples.get((kind, at), ())
        if len(samples) == MEMORY and not explores:
            self._paces.append(seconds / float(self.step_seconds(kind, requests)[rows]))
            self.pace = median(self._paces)
        else:
            usual, at_pace = float(self._verify[rows]), seconds / self.pace
            more = at_pace - usual
            self._learn(kind, requests, more if more > 0 else more / usual)

    def drafted(self, shape: SearchShape, requests: int, seconds: float) -> None:
        """A draft by this search took `seconds`."""
        usual = self.table.draft_seconds(requests, *shape)
        self._learn(DRAFT, requests, seconds / self.pace / usual - 1.0)

    def step_seconds(self, kind: int, requests: int) -> Floats:
        """[rows] V of steps of this kind, for 0, 1, 2... rows."""
        more = self._correction(kind, requests)
        return self._verify + more if more > 0 else self._verify * (1.0 + more)

    def plain_seconds(self, requests: int) -> float:
        """Of a plain step at present; 0 where none of about so many requests was ever timed."""
        if (PLAIN, bucket(requests)) not in self._samples:
            return 0.0
        return self.pace * float(self.step_seconds(PLAIN, requests)[requests])

    def draft_seconds(self, shape: SearchShape, requests: int) -> float:
        """D of this search."""
        usual = self.table.draft_seconds(requests, *shape)
        return usual * (1.0 + self._correction(DRAFT, requests))

    def _learn(self, kind: int, requests: int, sample: float) -> None:
        at = kind, bucket(requests)
        if at not in self._samples:
            # What is known without samples counts as one.
            self._samples[at] = deque([self._correction(kind, requests)], MEMORY)
        self._samples[at].append(sample)

    def _correction(self, kind: int, requests: int) -> float:
        """That of the nearest number of requests; of the other kinds' the least where this kind was
        never seen, as vLLM does the same around all of them."""
        here = bucket(requests)
        nearest: dict[int, int] = {}
        for other, at in self._samples:
            nearest[other] = min(nearest.get(other, at), at, key=lambda at: abs(at - here))
        if kind in nearest:
            return median(self._samples[kind, nearest[kind]])
        seen = (median(self._samples[each]) for each in nearest.items() if each[0] != DRAFT)
        return 0.0 if kind == DRAFT else min(seen, default=0.0)


def bucket(requests: int) -> int:
    """Half octaves: numbers of requests that are planned for alike."""
    return round(2.0 * math.log2(max(requests, 1)))
