"""How explored nodes are ranked, and what is learned from the verified ones."""

from __future__ import annotations

import pytest
import torch

from vllm_redrafter.beam_search import ExploredNodes
from vllm_redrafter.engine.v2.node_confidence import REFIT_AFTER, NodeConfidence
from vllm_redrafter.engine.v2.verification import Verification
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees

REQUESTS, K = 3, 4


@pytest.fixture
def confidence() -> NodeConfidence:
    """Slot 2 has a tree of three nodes; the others have roots."""
    trees = ScoredTrees(REQUESTS + 1, K, "cpu")
    trees.clear()
    trees.odds[2, 1:4] = torch.tensor([2.0, 1.0, -1.0])
    return NodeConfidence(trees, Verification(REQUESTS, K, torch.device("cpu")), max_depth=2)


def test_ranked_nodes_are_no_likelier_than_their_parents(confidence: NodeConfidence) -> None:
    log_probs = torch.tensor([[[-0.1, -2.0], [-0.2, -torch.inf]]])
    explored = ExploredNodes(torch.ones(1, 2, 2).long(), torch.zeros(1, 2, 2).long(), log_probs)
    ranked, odds = confidence.rank(explored)
    assert odds.shape == log_probs.shape
    assert ranked.log_probs[0, 1, 0] < ranked.log_probs[0, 0, 0] < 0
    assert ranked.log_probs[0, 1, 1] == -torch.inf
    assert ranked.tokens is explored.tokens


def test_a_refit_every_so_many_steps_follows_what_was_accepted(confidence: NodeConfidence) -> None:
    verification = confidence.verification
    staged = verification.staged
    # Node 1 below the root, 2 below 1, 3 below the root; the walk takes nodes 1 and 2 each time.
    staged.parents[0] = torch.tensor([0, 0, 1, 0, 0])
    staged.depths[0] = torch.tensor([0, 1, 2, 1, 0])
    staged.num_nodes[0] = 4
    verification.path[0] = torch.tensor([0, 1, 2, -1, -1])
    verification.note_verified(1, 1)
    before = confidence.estimator.biases.clone()
    for step in range(REFIT_AFTER):
        assert torch.equal(confidence.estimator.biases, before), step
        confidence.learn(torch.tensor([2]))
        confidence.count_step()
    after = confidence.estimator.biases
    assert after[1] > before[1], "all nodes of depth 2 were accepted"
    assert confidence.estimator.calibration().judged == 3 * REFIT_AFTER
