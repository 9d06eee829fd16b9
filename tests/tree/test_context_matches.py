# SPDX-License-Identifier: Apache-2.0
"""Continuations found in a text, against looking for them one place at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter_testing.algorithm.context_matches import search_and_paths, slow_matches
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import (
    MATCH_CLASSES,
    ContextMatches,
    find_matches,
    joined,
    with_matches,
)

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 8))
def test_the_longest_and_of_these_the_newest_matches_are_found(
    texts: list[list[int]], num_paths: int, path_length: int
) -> None:
    num_tokens = torch.tensor([len(text) for text in texts])
    # What stands behind a text is of other requests, and looks like a continuation.
    padded = torch.tensor([(text + text * 50)[:50] for text in texts])
    found = find_matches(padded, num_tokens, num_paths, path_length, 3)
    expected = [slow_matches(text, num_paths, path_length) for text in texts]
    assert found.tokens.tolist() == [paths for paths, _ in expected]
    assert found.classes.tolist() == [classes for _, classes in expected]


def test_a_path_ends_before_what_is_no_token() -> None:
    found = find_matches(torch.tensor([[1, 9, 1, 2, 9, 1]]), torch.tensor([6]), 2, 4, 9)
    assert found.tokens.tolist() == [[[2, -1, -1, -1], [-1] * 4]]
    assert found.classes.tolist() == [[[2, 0, 0, 0], [0] * 4]]


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


@pytest.mark.parametrize("seed", range(6))
def test_a_node_of_both_is_as_probable_as_the_more_confident_says(seed: int) -> None:
    explored, matches = search_and_paths(seed)
    probabilities = torch.rand(MATCH_CLASSES, 5, generator=torch.Generator().manual_seed(seed))
    nodes, match_classes = joined(explored, matches)
    found, live = with_matches(explored, matches, probabilities), is_node(nodes, match_classes)
    assert torch.equal(found.tokens, nodes.tokens)
    assert torch.equal(found.log_probs > -torch.inf, live)
    for r, level, beam in live.nonzero().tolist():
        parent = int(found.back_pointers[r, level, beam])
        above = float(found.log_probs[r, level - 1, parent]) if level else 0.0
        by_search = by_match = -float("inf")
        if nodes.log_probs[r, level, beam] > -torch.inf:
            by_search = -1.0  # every node of these searches, given its parent
        if length := int(match_classes[r, level, beam]):
            by_match = float(probabilities[length - 1, level].log())
        expected = above + max(by_search, by_match)
        assert float(found.log_probs[r, level, beam]) == pytest.approx(expected, abs=1e-5)
