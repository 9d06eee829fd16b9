"""How probable nodes are to be accepted, learned from the walks: greedy and sampled requests apart.

A request that samples accepts the drafter's best token less often than one that takes the most
probable token. One model for both would be wrong for either, by more the more they alternate.

The mathematics is that of `budget/calibration.py`, which says it in torch for any device; about
numba see `ranking.py`. A test holds the two equal.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_redrafter.budget.calibration import (
    BINS,
    DAMPING_OBSERVATIONS,
    INITIAL_OBSERVATIONS,
    MAX_BIAS_STEP,
    MAX_SLOPE_STEP,
    RIDGE,
    AcceptanceEstimator,
    Calibration,
)
from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.budget.refits import RefitsByNodes
from vllm_redrafter.utils.compiled import compiled

Array = npt.NDArray[Any]

LIMITS = RIDGE, INITIAL_OBSERVATIONS, DAMPING_OBSERVATIONS, MAX_SLOPE_STEP, MAX_BIAS_STEP
"""Given to the compiled refit, and not read by it: numba keeps what it compiled until this file
changes, and these stand in another."""


class AcceptanceModel:
    """An `AcceptanceEstimator` of requests that take the most probable token, and one of others.

    Attributes:
        slopes, biases: [2] and [2, L] float32, of either.
    """

    def __init__(self, max_depth: int) -> None:
        """For nodes of depths 1 to `max_depth`."""
        self._estimators = [AcceptanceEstimator(max_depth) for _ in range(2)]
        # Slope, biases and statistics of each, which the passes below change where they are.
        self._states = [
            (e.slope.numpy(), e.biases.numpy(), e.statistics.numpy()) for e in self._estimators
        ]
        self._refits = [RefitsByNodes() for _ in self._estimators]
        self.slopes = np.stack([slope[0] for slope, *_ in self._states])
        self.biases = np.stack([biases for _, biases, _ in self._states])

    def judge(
        self,
        sampled: Flags,
        log_odds: npt.NDArray[np.float32],
        depths: npt.NDArray[np.int32],
        accepted: Flags,
    ) -> None:
        """Learn from a step's judged nodes, [N] each: whether of requests that sample, the draft's
        log-odds, depths, and whether accepted."""
        for kind, state in enumerate(self._states):
            nodes = _observe(sampled, log_odds, depths, accepted, kind == 1, *state)
            if nodes and self._refits[kind].due(nodes):
                self._refit(kind)

    def calibration(self) -> Calibration:
        """The expected calibration errors since the last reset, of all nodes together."""
        both = [estimator.calibration() for estimator in self._estimators]
        judged = sum(found.judged for found in both)
        shares = [found.judged / max(judged, 1) for found in both]
        return Calibration(
            draft=sum(s * c.draft for s, c in zip(shares, both, strict=True) if s),
            calibrated=sum(s * c.calibrated for s, c in zip(shares, both, strict=True) if s),
            judged=judged,
        )

    def reset_calibration(self) -> None:
        """Begin to measure the calibration errors anew."""
        for estimator in self._estimators:
            estimator.reset_calibration()

    def _refit(self, kind: int) -> None:
        slope, biases, statistics = self._states[kind]
        _refit(slope, biases, statistics, self._estimators[kind].learned.numpy(), *LIMITS)
        self.slopes[kind], self.biases[kind] = slope[0], biases


@compiled
def _observe(
    sampled: Flags,
    log_odds: Array,
    depths: Array,
    accepted: Flags,
    kind: bool,
    slope: Array,
    biases: Array,
    statistics: Array,
) -> int:
    """See `AcceptanceEstimator.observe`, of whose tensors the last three are views.

    Args:
        sampled, log_odds, depths, accepted: of all judged nodes.
        kind: those of requests that sample are observed, or the others.
        slope, biases, statistics: of the kind's estimator.

    Returns:
        How many nodes were observed.
    """
    by_depth = 6 * biases.shape[0]
    sums = statistics[:by_depth].reshape(biases.shape[0], 6)
    bins = statistics[by_depth:].reshape(2, BINS, 3)
    observed = 0
    for node in range(log_odds.shape[0]):
        if sampled[node] != kind:
            continue
        observed += 1
        f, at = log_odds[node], depths[node] - 1
        y = 1.0 if accepted[node] else 0.0
        p = 1.0 / (1.0 + math.exp(-(slope[0] * f + biases[at])))
        weight, residual = p * (1.0 - p), y - p
        sums[at, 0] += weight * f * f
        sums[at, 1] += weight * f
        sums[at, 2] += weight
        sums[at, 3] += residual * f
        sums[at, 4] += residual
        sums[at, 5] += 1.0
        for which in range(2):
            predicted = p if which else 1.0 / (1.0 + math.exp(-f))
            of_bin = min(int(predicted * BINS), BINS - 1)
            bins[which, of_bin, 0] += 1.0
            bins[which, of_bin, 1] += predicted
            bins[which, of_bin, 2] += y
    return observed


@compiled
def _refit(
    slope: Array,
    biases: Array,
    statistics: Array,
    learned: Array,
    ridge: float,
    least: float,
    most: float,
    max_slope_step: float,
    max_bias_step: float,
) -> None:
    """See `AcceptanceEstimator.refit`; the nodes were observed, so that the sums are finite.

    Args:
        slope, biases, statistics, learned: of one estimator, changed.
        ridge, least, most, max_slope_step, max_bias_step: see `LIMITS`.
    """
    sums = statistics[: 6 * biases.shape[0]].reshape(biases.shape[0], 6)
    # The information of the slope and its gradient, the biases eliminated.
    information, gradient, total = ridge, 0.0, 0.0
    for a, b, c, g0, g1, count in sums:
        information += a - b * b / (c + ridge)
        gradient += g0 - b * g1 / (c + ridge)
        total += count
    step = gradient / information * total / (total + min(learned.sum() + least, most))
    # A draft that is more probable is not less probable to be accepted.
    step = max(min(max(step, -max_slope_step), max_slope_step), -slope[0])
    for depth, (_, b, c, _, g1, count) in enumerate(sums):
        damped = count / (count + min(learned[depth] + least, most))
        bias_step = (g1 - b * step) / (c + ridge) * damped
        biases[depth] += min(max(bias_step, -max_bias_step), max_bias_step)
        learned[depth] = min(learned[depth] + count, most)
    slope[0] += step
    sums[:] = 0.0
