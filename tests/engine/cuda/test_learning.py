# SPDX-License-Identifier: Apache-2.0
"""What drafts learn of the nodes that were verified, and matches that join them, on kernels.

A match is a prompt-lookup (n-gram) match: a continuation of an earlier occurrence in the text.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redrafter_testing.algorithm.context_matches import search_and_paths
from redrafter_testing.gpu.recorded_graphs import RecordedGraph, graphs_recorded
from redrafter_testing.gpu.torch_drafting import in_torch
from redrafter_testing.gpu.triton_interpreter import import_interpreted, interpreted

ON_GPU = torch.cuda.is_available()
KERNELS = ("find_matches", "join_matches", "observe_matches", "observe_nodes")
if not ON_GPU:
    import_interpreted(
        *(f"vllm_redrafter.triton_kernels.{name}" for name in KERNELS),
        "vllm_redrafter.engine.cuda.context_matching",
        "vllm_redrafter.engine.cuda.node_confidence",
    )

from vllm_redrafter.config import ReDrafterConfig  # noqa: E402
from vllm_redrafter.engine.cuda.context_matching import ContextMatching, ScoredNodes  # noqa: E402
from vllm_redrafter.engine.cuda.node_confidence import (  # noqa: E402
    FIRST_REFIT,
    LONGEST_REFIT,
    NodeConfidence,
)
from vllm_redrafter.engine.cuda.verification import Verification  # noqa: E402
from vllm_redrafter.tree.beam_search import ExploredNodes  # noqa: E402
from vllm_redrafter.tree.policy import SearchShape  # noqa: E402
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees  # noqa: E402

REQUESTS, K, LENGTH, WIDTH = 4, 6, 3, 3
SLOT = torch.tensor([2])
"""Of the batch's only request."""
pytestmark = pytest.mark.skipif(ON_GPU, reason="recordings stand for graphs on a CPU")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with interpreted():
        yield


@pytest.fixture
def trees() -> ScoredTrees:
    made = ScoredTrees(REQUESTS + 1, K, "cpu")
    made.clear()
    made.log_odds[2, 1:5] = torch.tensor([2.0, 1.0, -1.0, 0.5])
    return made


@pytest.fixture
def verification() -> Verification:
    """Node 1 below the root, 2 below 1, 3 below the root, 4 below 3; the walk took 1 and 2."""
    made = Verification(REQUESTS, K, torch.device("cpu"))
    made.staged.parents[0, :5] = torch.tensor([0, 0, 1, 0, 3])
    made.staged.depths[0, :5] = torch.tensor([0, 1, 2, 1, 2])
    made.staged.num_nodes[0] = 5
    made.path[0] = torch.tensor([0, 1, 2, -1, -1, -1, -1])
    made.num_verified[:1] = made.staged.num_nodes[:1]
    return made


@pytest.fixture
def confidence(trees: ScoredTrees, verification: Verification) -> NodeConfidence:
    return NodeConfidence(trees, verification, max_depth=2)


@pytest.fixture
def matching(trees: ScoredTrees, verification: Verification) -> ContextMatching:
    """Texts of four tokens, so that most have matches, of 1, 5, 30 and 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(4, (REQUESTS, 40), generator=generator).int()
    states: Any = SimpleNamespace(
        max_num_reqs=REQUESTS,
        vocab_size=4,
        all_token_ids=SimpleNamespace(gpu=texts),
        total_len=SimpleNamespace(gpu=torch.tensor([1, 5, 30, 40], dtype=torch.int32)),
    )
    config = ReDrafterConfig(K, WIDTH, LENGTH, context_matches=2, earlier_answers=0)
    searches = {0: SearchShape(0, 0), LENGTH: SearchShape(WIDTH, LENGTH)}
    totals = torch.zeros(4, dtype=torch.int64)
    table: Any = SimpleNamespace(config=config, trees=trees, verification=verification)
    made = ContextMatching(table, states, searches, totals)
    made.probabilities.uniform_(0.1, 0.9, generator=generator)
    verification.temperatures[0] = 1.0
    return made


@pytest.fixture
def learning(matching: ContextMatching) -> ContextMatching:
    """All nodes but 4 are on paths."""
    matching.trees.match_classes[2, 1:4] = torch.tensor([5, 5, 1])
    matching.verification.temperatures.zero_()
    return matching


def recorded(function: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
    """A graph of the function, and what it returned."""
    graph = RecordedGraph()
    with torch.inference_mode(), graphs_recorded(), torch.cuda.graph(graph):
        result = function()
    return graph, result


def found(length: int) -> ScoredNodes:
    """By a search for three requests; of length 0 by none."""
    explored, _ = search_and_paths(1, LENGTH, WIDTH)
    parts = explored.tokens, explored.back_pointers, explored.log_probs
    levels = (slice(3), slice(length), slice(WIDTH if length else 0))
    nodes = ExploredNodes(*(part[levels].contiguous() for part in parts))
    return ScoredNodes(nodes, torch.rand(nodes.log_probs.shape))


@pytest.mark.parametrize("length", [LENGTH, 0])
def test_kernels_join_what_torch_does_in_three_launches(
    matching: ContextMatching, length: int
) -> None:
    """Of a padded batch."""
    slots, search = torch.tensor([3, 2, REQUESTS]), found(length)
    graph, joined = recorded(lambda: matching.join(length, search, slots))
    slots[1] = 0
    graph.replay()
    of_kernels = deepcopy(joined)
    with in_torch("context_matching"):
        expected = matching.join(length, search, slots)
    assert expected.match_classes is not None and expected.match_classes[0].any()
    assert not expected.match_classes[2].any()
    for name in ("tokens", "back_pointers", "log_probs"):
        torch.testing.assert_close(getattr(of_kernels.nodes, name), getattr(expected.nodes, name))
    torch.testing.assert_close(of_kernels[1:], expected[1:])
    assert graph.num_nodes == 3


def test_kernels_learn_of_matches_what_torch_does_in_one_launch(learning: ContextMatching) -> None:
    learning.counts[1, 0, 0, 1] = 0.0  # never accepted, and faded away
    prior = learning.counts.clone()
    with in_torch("context_matching"):
        learning.learn(SLOT)
    expected = learning.counts.clone(), learning.probabilities.clone()
    graph, _ = recorded(lambda: learning.learn(SLOT))
    learning.counts.copy_(prior)
    graph.replay()
    torch.testing.assert_close((learning.counts, learning.probabilities), expected)
    assert graph.num_nodes == 1
    assert learning.probabilities.all()


def test_greedy_and_sampled_requests_are_calibrated_apart(confidence: NodeConfidence) -> None:
    """Of the same tree in one batch, a greedy request's walk took two nodes, a sampled one's none;
    kernels learn what torch does, in two launches."""
    verification, estimator = confidence.verification, confidence.estimator
    for part in (*vars(verification.staged).values(), verification.num_verified):
        part[1] = part[0]
    verification.path[1, 1:] = -1
    verification.temperatures[1] = 0.7
    slots, statistics, before = SLOT.repeat(2), estimator.statistics, estimator.biases.clone()
    with in_torch("node_confidence"):
        confidence.learn(slots)
    expected = statistics.clone()
    graph, _ = recorded(lambda: confidence.learn(slots))
    statistics.zero_()
    graph.replay()
    torch.testing.assert_close(statistics, expected)
    assert graph.num_nodes == 2
    estimator.refit()
    greedy, sampled = estimator.biases - before
    assert greedy[1] > 0, "its only judged node of depth 2 was accepted"
    assert sampled[0] < 0
    assert sampled[1] == 0, "of depth 2 it has no judged node"


def test_refits_follow_what_was_accepted_soon_and_then_as_seldom_as_vllms(
    confidence: NodeConfidence,
) -> None:
    confidence.learn(SLOT)
    of_a_step = confidence.estimator.statistics.clone()
    before, refits = confidence.estimator.biases.clone(), []
    for step in range(1, 4 * LONGEST_REFIT):
        confidence.count_step()
        if not torch.equal(confidence.estimator.biases, before):
            refits.append(step)
            after = confidence.estimator.biases
            assert after[0, 1] > before[0, 1], "all nodes of depth 2 were accepted"
            before = after.clone()
        confidence.estimator.statistics.add_(of_a_step)
    assert refits[0] == FIRST_REFIT
    waits = [later - sooner for sooner, later in pairwise(refits)]
    assert waits == [16, 32, 64, LONGEST_REFIT, LONGEST_REFIT]
