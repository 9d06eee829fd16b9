# SPDX-License-Identifier: Apache-2.0
"""What is learned from the verified nodes, and how often."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from redrafter_testing.gpu.recorded_graphs import RecordedGraph, graphs_recorded
from redrafter_testing.gpu.torch_drafting import in_torch
from redrafter_testing.gpu.triton_interpreter import import_interpreted, interpreted

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    import_interpreted(
        "vllm_redrafter.triton_kernels.observe_nodes",
        "vllm_redrafter.engine.cuda.node_confidence",
    )

from vllm_redrafter.engine.cuda.node_confidence import (  # noqa: E402
    FIRST_REFIT,
    LONGEST_REFIT,
    NodeConfidence,
)
from vllm_redrafter.engine.cuda.verification import Verification  # noqa: E402
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees  # noqa: E402

REQUESTS, K = 3, 4
pytestmark = pytest.mark.skipif(ON_GPU, reason="recordings stand for graphs on a CPU")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with interpreted():
        yield


@pytest.fixture
def confidence() -> NodeConfidence:
    """Slot 2 has a tree of three nodes; the others have roots."""
    trees = ScoredTrees(REQUESTS + 1, K, "cpu")
    trees.clear()
    trees.log_odds[2, 1:4] = torch.tensor([2.0, 1.0, -1.0])
    return NodeConfidence(trees, Verification(REQUESTS, K, torch.device("cpu")), max_depth=2)


def walk(confidence: NodeConfidence) -> None:
    """Node 1 below the root, 2 below 1, 3 below the root; the walk took nodes 1 and 2."""
    verification = confidence.verification
    staged = verification.staged
    staged.parents[0] = torch.tensor([0, 0, 1, 0, 0])
    staged.depths[0] = torch.tensor([0, 1, 2, 1, 0])
    staged.num_nodes[0] = 4
    verification.path[0] = torch.tensor([0, 1, 2, -1, -1])
    verification.note_verified(1, 1)


def test_kernels_learn_what_torch_does_in_two_launches(confidence: NodeConfidence) -> None:
    walk(confidence)
    slots = torch.tensor([2])
    statistics = confidence.estimator.statistics
    with in_torch("node_confidence"):
        confidence.learn(slots)
    expected = statistics.clone()
    assert expected.any()
    statistics.zero_()
    graph = RecordedGraph()
    with torch.inference_mode():
        with graphs_recorded(), torch.cuda.graph(graph):
            confidence.learn(slots)
        torch.testing.assert_close(statistics, expected)
        graph.replay()
    torch.testing.assert_close(statistics, 2 * expected)
    assert len(graph._recording.nodes) == 2


def test_refits_follow_what_was_accepted_soon_and_then_as_seldom_as_vllms(
    confidence: NodeConfidence,
) -> None:
    walk(confidence)
    confidence.learn(torch.tensor([2]))
    of_a_step = confidence.estimator.statistics.clone()
    before, refits = confidence.estimator.biases.clone(), []
    for step in range(1, 4 * LONGEST_REFIT):
        confidence.count_step()
        if not torch.equal(confidence.estimator.biases, before):
            refits.append(step)
            after = confidence.estimator.biases
            assert after[1] > before[1], "all nodes of depth 2 were accepted"
            before = after.clone()
        confidence.estimator.statistics.add_(of_a_step)
    assert refits[0] == FIRST_REFIT
    waits = [later - sooner for sooner, later in pairwise(refits)]
    assert waits == [16, 32, 64, LONGEST_REFIT, LONGEST_REFIT]
