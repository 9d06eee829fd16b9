# SPDX-License-Identifier: Apache-2.0
"""The probability that the target accepts each drafted node: the base of the batch's budget.

Predicted from the drafter's probabilities and learned from verified nodes, on the device: of greedy
and of sampled requests apart, as their temperatures tell.
"""

import torch
from torch import Tensor

from vllm_redrafter.budget.acceptance import AcceptanceEstimator, RefitSchedule
from vllm_redrafter.engine.v2.verification import Verification
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees
from vllm_redrafter.triton_kernels.observe_nodes import COLUMNS, observe_nodes

FIRST_REFIT, LONGEST_REFIT = 8, 100
"""Verifying steps before the first refit, which is a dozen launches, and at most from one to the
next, as in vLLM's `acceptance_estimator.py`."""


class NodeConfidence:
    """Learns how probable nodes are to be accepted, for vLLM's adaptive verification.

    Attributes:
        estimator: of greedy requests and of sampled ones.
        parameters: slopes, biases and temperatures, as `grow_beams` reads them.
    """

    def __init__(self, trees: ScoredTrees, verification: Verification, max_depth: int) -> None:
        self.trees, self.verification = trees, verification
        requests, device = len(verification.path), verification.path.device
        self.estimator = AcceptanceEstimator(max_depth, device, kinds=(2,))
        learned = self.estimator.slope, self.estimator.biases
        self.parameters = *learned, verification.temperatures
        self._sums = torch.zeros(requests, max_depth, COLUMNS, device=device)
        self._refits = RefitSchedule(FIRST_REFIT, LONGEST_REFIT)

    def learn(self, slots: Tensor) -> None:
        """Learn from the verified trees of `slots` [R], before others replace them."""
        learned = self.estimator
        observe_nodes(
            slots,
            self.trees.log_odds,
            self.verification.verified_trees(),
            learned.slope,
            learned.biases,
            self._sums,
            learned.statistics,
        )

    def count_step(self) -> None:
        """Refit where that is due; the host calls it in every step that verifies."""
        if self._refits.due():
            self.estimator.refit()
