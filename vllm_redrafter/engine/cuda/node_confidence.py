"""How probable it is that the target accepts each drafted node: what the batch's budget goes by.

Predicted from the drafter's own probabilities, and learned from what became of the nodes that were
verified (`vllm_redrafter/budget/acceptance.py`), on the device: the draft's CUDA graph holds it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_redrafter.budget.acceptance import AcceptanceEstimator, RefitSchedule, log_odds_of
from vllm_redrafter.engine.cuda.verification import Verification
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees
from vllm_redrafter.triton_kernels.observe_nodes import COLUMNS, observe_nodes

FIRST_REFIT, LONGEST_REFIT = 8, 100
"""Verifying steps before the first refit, which is a dozen launches, and at most from one to the
next, as in vLLM's `acceptance_estimator.py`."""


class NodeConfidence:
    """Ranks explored nodes, and tells vLLM's adaptive verification of those kept.

    Attributes:
        estimator: what is learned.
        probs: [requests, K] float32, in batch order, of the last draft: what `build_tree` writes,
            for vLLM to read.
        on_kernels: whether kernels learn, or torch: on a CPU, where launches cost nothing.
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
        self.on_kernels = device.type == "cuda"
        self.estimator = AcceptanceEstimator(max_depth, device)
        self.probs = torch.zeros(requests, slots - 1, device=device)
        self._sums = torch.zeros(requests, max_depth, COLUMNS, device=device)
        self._refits = RefitSchedule(FIRST_REFIT, LONGEST_REFIT)

    def learn(self, slots: Tensor) -> None:
        """Add what became of the trees that the step has verified; before others replace them.

        Args:
            slots: [R] int64, the slots of the batch's first requests.
        """
        requests = slots.shape[0]
        if self.on_kernels:
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
            return
        log_odds = self.trees.log_odds.index_select(0, slots)
        judged, accepted = self.verification.judged(requests)
        # Of what the drafter did not find, only the text tells.
        unknown = log_odds == -torch.inf
        self.estimator.observe(
            log_odds.masked_fill(unknown, 0.0),
            self.verification.staged.depths[:requests],
            judged & ~unknown,
            accepted,
        )

    def count_step(self) -> None:
        """Refit where that is due; to be called by the host in every step that verifies."""
        if self._refits.due():
            self.estimator.refit()

    def rank(self, explored: ExploredNodes) -> tuple[ExploredNodes, Tensor]:
        """The same nodes with the logs of their survival probabilities, and the log-odds."""
        found = explored.log_probs, explored.back_pointers
        log_odds = log_odds_of(*found)
        return replace(explored, log_probs=self.estimator.log_survival(log_odds, *found)), log_odds
