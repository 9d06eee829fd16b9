# SPDX-License-Identifier: Apache-2.0
"""Kernels find, join and learn what torch does, in four launches; and what is counted."""

from collections.abc import Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redrafter_testing.algorithm.context_matches import search_and_paths
from redrafter_testing.gpu.recorded_graphs import RecordedGraph, graphs_recorded
from redrafter_testing.gpu.torch_drafting import in_torch
from redrafter_testing.gpu.triton_interpreter import import_interpreted, interpreted

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    import_interpreted(
        "vllm_redrafter.triton_kernels.find_matches",
        "vllm_redrafter.triton_kernels.join_matches",
        "vllm_redrafter.triton_kernels.observe_matches",
        "vllm_redrafter.engine.cuda.context_matching",
    )

from vllm_redrafter.config import ReDrafterConfig  # noqa: E402
from vllm_redrafter.engine.cuda.context_matching import (  # noqa: E402
    ContextMatching,
    ScoredNodes,
)
from vllm_redrafter.engine.cuda.verification import Verification  # noqa: E402
from vllm_redrafter.tree.beam_search import ExploredNodes  # noqa: E402
from vllm_redrafter.tree.policy import SearchShape  # noqa: E402
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees  # noqa: E402

REQUESTS, K, LENGTH, WIDTH = 4, 6, 3, 3
pytestmark = pytest.mark.skipif(ON_GPU, reason="recordings stand for graphs on a CPU")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with interpreted():
        yield


@pytest.fixture
def matching() -> ContextMatching:
    """Texts of four tokens, so that most have matches, of 1, 5, 30 and 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(4, (REQUESTS, 40), generator=generator).int()
    states: Any = SimpleNamespace(
        max_num_reqs=REQUESTS,
        vocab_size=4,
        all_token_ids=SimpleNamespace(gpu=texts),
        total_len=SimpleNamespace(gpu=torch.tensor([1, 5, 30, 40], dtype=torch.int32)),
    )
    trees = ScoredTrees(REQUESTS + 1, K, "cpu")
    trees.clear()
    config = ReDrafterConfig(K, WIDTH, LENGTH, context_matches=2)
    searches = {0: SearchShape(0, 0), LENGTH: SearchShape(WIDTH, LENGTH)}
    verification = Verification(REQUESTS, K, torch.device("cpu"))
    made = ContextMatching(config, states, trees, verification, searches)
    made.probabilities.uniform_(0.1, 0.9, generator=generator)
    temperature = torch.tensor([0.0, 0.7, 0.0, 1.0])
    made.load(temperature, torch.tensor([3, 0, 2]))
    return made


def found(length: int) -> ScoredNodes:
    """By a search for three requests; of length 0 by none."""
    explored, _ = search_and_paths(1, LENGTH, WIDTH)
    parts = explored.tokens, explored.back_pointers, explored.log_probs
    levels = (slice(3), slice(length), slice(WIDTH if length else 0))
    nodes = ExploredNodes(*(part[levels].contiguous() for part in parts))
    return ScoredNodes(nodes, torch.rand(nodes.log_probs.shape))


@pytest.mark.parametrize("length", [LENGTH, 0])
def test_kernels_join_the_same_in_three_launches(matching: ContextMatching, length: int) -> None:
    """Of a padded batch."""
    slots = torch.tensor([3, 2, REQUESTS])
    search = found(length)
    graph = RecordedGraph()
    with torch.inference_mode():
        with graphs_recorded(), torch.cuda.graph(graph):
            joined = matching.join(length, search, slots)
        slots[1] = 0
        graph.replay()
    found_by_kernels = deepcopy(joined)
    with in_torch("context_matching"):
        expected = matching.join(length, search, slots)
    assert expected.match_lengths is not None and expected.match_lengths[0].any()
    assert not expected.match_lengths[2].any()
    for name in ("tokens", "back_pointers", "log_probs"):
        of_kernels = getattr(found_by_kernels.nodes, name)
        torch.testing.assert_close(of_kernels, getattr(expected.nodes, name))
    torch.testing.assert_close(found_by_kernels[1:], expected[1:])
    assert graph.num_nodes == 3


def walk(matching: ContextMatching) -> None:
    """Slot 2 is the batch's first request: node 1 below the root, 2 below 1, 3 below the root, 4
    below 3; the walk took nodes 1 and 2. All but 4 are on paths."""
    matching.trees.match_lengths[2, 1:4] = torch.tensor([5, 5, 1])
    staged = matching.verification.staged
    staged.parents[0, :5] = torch.tensor([0, 0, 1, 0, 3])
    staged.depths[0, :5] = torch.tensor([0, 1, 2, 1, 2])
    staged.num_nodes[0] = 5
    matching.verification.path[0] = torch.tensor([0, 1, 2, -1, -1, -1, -1])
    matching.verification.note_verified(1, 1)
    matching.load(torch.zeros(REQUESTS), torch.tensor([2]))


def test_kernels_learn_the_same_in_one_launch(matching: ContextMatching) -> None:
    walk(matching)
    matching.counts[1, 0, 0, 1] = 0.0  # never accepted, and faded away
    slots, prior = torch.tensor([2]), matching.counts.clone()
    with in_torch("context_matching"):
        matching.learn(slots)
    expected = matching.counts.clone(), matching.probabilities.clone()
    matching.counts.copy_(prior)
    graph = RecordedGraph()
    with torch.inference_mode():
        with graphs_recorded(), torch.cuda.graph(graph):
            matching.learn(slots)
        matching.counts.copy_(prior)
        graph.replay()
    torch.testing.assert_close((matching.counts, matching.probabilities), expected)
    assert graph.num_nodes == 1
    assert matching.probabilities.all()


def test_verified_and_accepted_nodes_on_paths_are_counted(matching: ContextMatching) -> None:
    walk(matching)
    slots = torch.tensor([2])
    assert matching.verified(slots).tolist() == [3, 2]
    matching.verification.staged.num_nodes[0] = 2  # the budget's
    matching.verification.note_verified(1, 1)
    assert matching.verified(slots).tolist() == [1, 1]
