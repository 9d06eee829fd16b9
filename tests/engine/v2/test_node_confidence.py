"""What vLLM's manager is told of drafted nodes, and what is learned from the verified ones."""

from __future__ import annotations

import pytest
import torch

from vllm_redrafter.beam_search import ExploredNodes
from vllm_redrafter.engine.v2.node_confidence import REFIT_AFTER, NodeConfidence
from vllm_redrafter.engine.v2.verification import Verification
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees

REQUESTS, K = 3, 4
SURVIVAL = [0.9, 0.6, 0.6, 0.0]


@pytest.fixture
def confidence() -> NodeConfidence:
    """Slot 2 has a tree of three nodes, 0.9, 0.6 and 0.6 probable; the others have roots."""
    trees = ScoredTrees(REQUESTS + 1, K, "cpu")
    trees.clear()
    trees.log_probs[2, 1:] = torch.tensor(SURVIVAL).log()
    trees.odds[2, 1:4] = torch.tensor([2.0, 1.0, -1.0])
    return NodeConfidence(trees, Verification(REQUESTS, K, torch.device("cpu")), max_depth=2)


def published(confidence: NodeConfidence, limits: list[int]) -> torch.Tensor:
    """Survival probabilities as vLLM works them out, of slots 2 and 0."""
    confidence.probs.fill_(-1)
    confidence.publish(torch.tensor([2, 0]), torch.tensor(limits, dtype=torch.int32))
    assert (confidence.probs[2] == -1).all(), "another request's is written"
    assert (confidence.probs[:2] <= 1).all()
    return confidence.probs[:2].cumprod(dim=1)


def test_vllm_s_running_product_gives_the_survival_probabilities(
    confidence: NodeConfidence,
) -> None:
    found = published(confidence, [K, K])
    torch.testing.assert_close(found, torch.tensor([SURVIVAL, [0.0] * K]))


def test_nodes_that_a_request_does_not_want_have_no_chance(confidence: NodeConfidence) -> None:
    found = published(confidence, [1, K])
    torch.testing.assert_close(found[0], torch.tensor([0.9, 0.0, 0.0, 0.0]))
    assert not published(confidence, [0, K]).any()


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
