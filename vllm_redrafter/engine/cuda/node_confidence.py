# SPDX-License-Identifier: Apache-2.0
"""How probable it is that the target accepts each drafted node: what the batch's budget goes by.

Predicted from the drafter's own probabilities, and learned from what became of the nodes that were
verified (`vllm_redrafter/budget/acceptance.py`), on the device: the draft's CUDA graph holds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_redrafter.budget.acceptance import AcceptanceEstimator, RefitSchedule
from vllm_redrafter.engine.cuda.verification import Verification
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees
from vllm_redrafter.triton_kernels.observe_nodes import COLUMNS, observe_nodes

FIRST_REFIT, LONGEST_REFIT = 8, 100
"""Verifying steps before the first refit, which is a dozen launches, and at most from one to the
next, as in vLLM's `acceptance_estimator.py`."""


class NodeConfidence:
    """Learns how probable nodes are to be accepted, and tells vLLM's adaptive verification.

    Attributes:
        estimator: what is learned.
        probs: [requests, K] float32, in batch order, of the last draft: what `build_tree` writes,
            for vLLM to read.
    """

    def __init__(self, trees: ScoredTrees, verification: Verification, max_depth: int) -> None:
        """For trees of depths up to `max_depth`.

        Args:
            trees: by request slot, as the drafts leave them.
            verification: of these trees.
            max_depth: L.
        """
        self.trees, self.verification = trees, verification
        requests, slots = verification.path.shape
        device = verification.path.device
        self.estimator = AcceptanceEstimator(max_depth, device)
        self.probs = torch.zeros(requests, slots - 1, device=device)
        self._sums = torch.zeros(requests, max_depth, COLUMNS, device=device)
        self._refits = RefitSchedule(FIRST_REFIT, LONGEST_REFIT)

    def learn(self, slots: Tensor) -> None:
        """Add what became of the trees that the step has verified; before others replace them.

        Args:
            slots: [R] int64, the slots of the batch's first requests.
        """
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
        """Refit where that is due; to be called by the host in every step that verifies."""
        if self._refits.due():
            self.estimator.refit()
