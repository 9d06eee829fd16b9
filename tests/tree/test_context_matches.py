# SPDX-License-Identifier: Apache-2.0
"""How probable nodes are that a search and a match have."""

import pytest
import torch

from redrafter_testing.algorithm.context_matches import joined, search_and_paths
from vllm_redrafter.tree.context_matches import MATCH_CLASSES, joint_scores


@pytest.mark.parametrize("seed", range(6))
def test_a_node_of_both_is_as_probable_as_the_more_confident_says(seed: int) -> None:
    explored, matches = search_and_paths(seed)
    probabilities = torch.rand(MATCH_CLASSES, 5, generator=torch.Generator().manual_seed(seed))
    nodes, match_classes = joined(explored, matches)
    live = (nodes.log_probs > -torch.inf) | (match_classes > 0)
    scores = joint_scores(nodes, match_classes, probabilities)
    assert torch.equal(scores > -torch.inf, live)
    for r, level, beam in live.nonzero().tolist():
        parent = int(nodes.back_pointers[r, level, beam])
        above = float(scores[r, level - 1, parent]) if level else 0.0
        by_search = by_match = -float("inf")
        if nodes.log_probs[r, level, beam] > -torch.inf:
            by_search = -1.0  # every node of these searches, given its parent
        if length := int(match_classes[r, level, beam]):
            by_match = float(probabilities[length - 1, level].log())
        expected = above + max(by_search, by_match)
        assert float(scores[r, level, beam]) == pytest.approx(expected, abs=1e-5)
