# SPDX-License-Identifier: Apache-2.0
"""How probable nodes are to be accepted, learned from the walks: greedy and sampled requests apart.

A sampled request accepts the drafter's best token less often: one model would be wrong for both.
"""

import math

import numpy as np
import numpy.typing as npt

from vllm_redrafter.budget.acceptance import AcceptanceEstimator, RefitSchedule
from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.budget.match_acceptance import MEMORY, PRIOR_WEIGHT, prior_acceptance
from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED, PerSampling
from vllm_redrafter.utils.compiled import Array, compiled

FIRST_REFIT, LONGEST_REFIT = 4, 16
"""Verifying steps before the first refit, and at most from one to the next."""


class AcceptanceModel:
    """An `AcceptanceEstimator` of greedy and of sampled requests: slopes [2], biases [2, L]."""

    def __init__(self, max_depth: int, recorded: PerSampling = NOTHING_RECORDED) -> None:
        self._estimator = AcceptanceEstimator(max_depth, kinds=(2,))
        self._estimator.start_from(recorded)
        self._refits = [RefitSchedule(FIRST_REFIT, LONGEST_REFIT) for _ in range(2)]
        # The same memory, which is changed in place.
        self._statistics = self._estimator.statistics.numpy()
        self.slopes = self._estimator.slope.numpy()[:, 0]
        self.biases = self._estimator.biases.numpy()

    def observe(
        self,
        sampled: Flags,
        log_odds: npt.NDArray[np.float32],
        depths: npt.NDArray[np.int32],
        accepted: Flags,
    ) -> None:
        """Learn from a step's judged nodes, [N] each; `sampled`: of requests that sample."""
        nodes = sampled, log_odds, depths, accepted
        for kind, state in enumerate(zip(self.slopes, self.biases, self._statistics, strict=True)):
            if _observe(*nodes, kind == 1, *state) and self._refits[kind].due():
                self._estimator.refit(kind)


class MatchAcceptance:
    """`probabilities`, [2, MATCH_CLASSES, D] float32, of greedy and of sampled requests, by class
    of the match and by depth from 1 on; and what they were learned from."""

    def __init__(self, path_length: int) -> None:
        prior = np.stack([prior_acceptance(path_length)] * 2)
        self._judged = np.full(prior.shape, PRIOR_WEIGHT)
        self._accepted = PRIOR_WEIGHT * prior
        self.probabilities = prior.astype(np.float32)

    def observe(
        self,
        sampled: Flags,
        match_classes: npt.NDArray[np.int64],
        depths: npt.NDArray[np.int32],
        accepted: Flags,
    ) -> None:
        """Learn from judged nodes that continue matches, [N] each."""
        if not len(match_classes):
            return
        at = sampled.astype(np.int64), match_classes - 1, depths - 1
        np.add.at(self._judged, at, 1.0)
        np.add.at(self._accepted, at, accepted)
        kept = np.minimum(MEMORY / self._judged, 1.0)
        self._judged *= kept
        # What was never accepted may be: a probability of 0 would never be tried again.
        self._accepted = np.maximum(self._accepted * kept, 1.0)
        self.probabilities[:] = self._accepted / self._judged


@compiled
def _observe(
    sampled: Flags,
    log_odds: Array,
    depths: Array,
    accepted: Flags,
    kind: bool,
    slope: float,
    biases: Array,
    statistics: Array,
) -> int:
    """`AcceptanceEstimator.observe` of the nodes of one kind of request; returns their number."""
    observed = 0
    for node in range(log_odds.shape[0]):
        if sampled[node] != kind:
            continue
        observed += 1
        f, at = log_odds[node], depths[node] - 1
        y = 1.0 if accepted[node] else 0.0
        p = 1.0 / (1.0 + math.exp(-(slope * f + biases[at])))
        weight, residual = p * (1.0 - p), y - p
        statistics[at, 0] += weight * f * f
        statistics[at, 1] += weight * f
        statistics[at, 2] += weight
        statistics[at, 3] += residual * f
        statistics[at, 4] += residual
        statistics[at, 5] += 1.0
    return observed
