# SPDX-License-Identifier: Apache-2.0
"""The nodes of a search and of paths in one grid."""

import pytest
import torch

from redrafter_testing.algorithm.context_matches import joined, search_and_paths
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import ContextMatches


def is_node(nodes: ExploredNodes, match_classes: torch.Tensor) -> torch.Tensor:
    return (nodes.log_probs > -torch.inf) | (match_classes > 0)


def paths_of(
    nodes: ExploredNodes, match_classes: torch.Tensor, r: int
) -> dict[tuple[int, ...], tuple[float, int]]:
    """Of each node, by the tokens from the root on: its log-probability and length of match."""
    found = {}
    at: dict[tuple[int, int], tuple[int, ...]] = {}
    for level, beam in is_node(nodes, match_classes)[r].nonzero().tolist():
        above = at[level - 1, int(nodes.back_pointers[r, level, beam])] if level else ()
        path = (*above, int(nodes.tokens[r, level, beam]))
        assert path not in found, "a node stands twice"
        at[level, beam] = path
        found[path] = float(nodes.log_probs[r, level, beam]), int(match_classes[r, level, beam])
    return found


@pytest.mark.parametrize("seed", range(8))
def test_joined_nodes_are_those_of_both_and_no_node_stands_twice(seed: int) -> None:
    explored, matches = search_and_paths(seed)
    found = joined(explored, matches)
    none = ContextMatches(matches.tokens.new_full((4, 0, 5), -1), matches.classes[:, :0])
    for r in range(4):
        expected = paths_of(*joined(explored, none), r)
        for path in range(matches.tokens.shape[1]):
            tokens, classes = matches.tokens[r, path].tolist(), matches.classes[r, path].tolist()
            for depth in range(1, [*classes, 0].index(0) + 1):
                above = tuple(tokens[:depth])
                expected[above] = expected.get(above, (-float("inf"), 0))[0], classes[depth - 1]
        assert paths_of(*found, r) == expected
