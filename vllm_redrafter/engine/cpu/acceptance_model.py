"""How probable nodes are to be accepted, learned from the walks: greedy and sampled requests apart.

A request that samples accepts the drafter's best token less often than one that takes the most
probable token. One model for both would be wrong for either, by more the more they alternate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_redrafter.budget.calibration import AcceptanceEstimator, Calibration
from vllm_redrafter.budget.choice import Flags

REFIT_STEPS, REFIT_NODES = 4, 32
"""Verification steps, and nodes judged in them, from one refit of the acceptance probabilities to
the next: a new drafter is judged soon, and so is another kind of text."""


class AcceptanceModel:
    """An `AcceptanceEstimator` of requests that take the most probable token, and one of others."""

    def __init__(self, max_depth: int) -> None:
        """For nodes of depths 1 to `max_depth`."""
        self._estimators = [AcceptanceEstimator(max_depth) for _ in range(2)]
        # By estimator, since its last refit: log-odds, depths, whether accepted, of nodes judged.
        self._judged: list[list[tuple[npt.NDArray[Any], ...]]] = [[], []]
        self._take_parameters()

    def parameters(self, sampled: Flags) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Slopes [R] and biases [R, L] of requests that sample or do not, [R] bool."""
        kinds = sampled.astype(np.int64)
        return self._slopes[kinds], self._biases[kinds]

    def judge(
        self,
        sampled: Flags,
        odds: npt.NDArray[np.float32],
        depths: npt.NDArray[np.int32],
        accepted: Flags,
    ) -> None:
        """Learn from a step's judged nodes, [N] each: whether of requests that sample, the draft's
        log-odds, depths, and whether accepted."""
        for kind, of_kind in enumerate((~sampled, sampled)):
            if of_kind.any():
                self._judged[kind].append((odds[of_kind], depths[of_kind], accepted[of_kind]))
                self._refit_if_due(kind)

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

    def _refit_if_due(self, kind: int) -> None:
        steps = self._judged[kind]
        if len(steps) < REFIT_STEPS or sum(len(step[0]) for step in steps) < REFIT_NODES:
            return
        odds, depths, accepted = (
            torch.from_numpy(np.concatenate(part)) for part in zip(*steps, strict=True)
        )
        steps.clear()
        self._estimators[kind].observe(odds, depths, torch.ones_like(accepted), accepted)
        self._estimators[kind].refit()
        self._take_parameters()

    def _take_parameters(self) -> None:
        self._slopes = np.array([e.slope.item() for e in self._estimators], dtype=np.float32)
        self._biases = np.stack([e.biases.numpy() for e in self._estimators])
