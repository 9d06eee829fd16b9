# SPDX-License-Identifier: Apache-2.0
"""Token trees hold the best explored nodes, in an order whose every prefix is again a tree."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm import naive
from redrafter_testing.algorithm.naive import Prefix
from redrafter_testing.algorithm.random_trees import explored_nodes
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import search_shape
from vllm_redrafter.tree.token_tree import TokenTree

KINDS = st.sampled_from(["explored", "beams"])

drawn = settings(deadline=None, max_examples=100)
max_nodes_of_a_tree = st.integers(1, 24)


def root_tokens(explored: ExploredNodes) -> Tensor:
    return torch.arange(explored.tokens.shape[0]) + 100


def build(explored: ExploredNodes, max_nodes: int, **options: Any) -> TokenTree:
    return TokenTree.from_explored(root_tokens(explored), explored, max_nodes, **options)


def allowed_log_probs(explored: ExploredNodes, request: int, kind: str) -> dict[Prefix, float]:
    """Every node that may be in a tree, as a prefix, with its log-probability."""
    log_probs = explored.log_probs[request].tolist()
    prefixes = naive.explored_prefixes(
        explored.tokens[request].tolist(), explored.back_pointers[request].tolist(), log_probs
    )
    found = {
        prefix: log_prob
        for row, row_log_probs in zip(prefixes, log_probs, strict=True)
        for prefix, log_prob in zip(row, row_log_probs, strict=True)
        if prefix is not None
    }
    if kind != "beams":
        return found
    beams = [beam for beam in prefixes[-1] if beam is not None]
    return {p: q for p, q in found.items() if any(beam[: len(p)] == p for beam in beams)}


def prefixes_of(tree: TokenTree, request: int) -> list[Prefix]:
    """The prefix of every node, in the tree's order; the root is not among them."""
    links = tree.tokens[request].tolist(), tree.parents[request].tolist()
    return naive.node_prefixes(*links, int(tree.num_nodes[request]))[1:]


def assert_trees(tree: TokenTree, roots: Tensor, slots: int) -> None:
    """Everything that holds for any trees, whatever they were built from."""
    for field in (tree.tokens, tree.parents, tree.depths):
        assert field.shape == (len(roots), slots) and field.dtype == torch.int32
    assert tree.num_nodes.dtype == tree.ancestors.dtype == torch.int32
    for request in range(len(roots)):
        tokens, parents = tree.tokens[request].tolist(), tree.parents[request].tolist()
        depths, num_nodes = tree.depths[request].tolist(), int(tree.num_nodes[request])
        assert 1 <= num_nodes <= slots
        assert (tokens[0], parents[0], depths[0]) == (int(roots[request]), 0, 0)
        for node in range(1, num_nodes):
            assert parents[node] < node, "a parent stands before its child"
            assert depths[node] == depths[parents[node]] + 1
        siblings = list(zip(parents[1:num_nodes], tokens[1:num_nodes], strict=True))
        assert len(set(siblings)) == len(siblings), "siblings carry different tokens"
        assert tokens[num_nodes:] == [-1] * (slots - num_nodes)
        assert parents[num_nodes:] == depths[num_nodes:] == [0] * (slots - num_nodes)
        assert tree.is_node[request].tolist() == [i < num_nodes for i in range(slots)]
        words = tree.ancestors[request].tolist()
        for node in range(slots):
            expected = naive.ancestors(parents, node)
            assert set(tree.ancestor_mask[request, node].nonzero().flatten().tolist()) == expected
            assert {j for j in range(slots) if words[node][j // 32] >> (j % 32) & 1} == expected


@drawn
@given(explored_nodes(), max_nodes_of_a_tree, KINDS)
def test_nodes_are_the_best_of_those_allowed_in_descending_order(
    explored: ExploredNodes, max_nodes: int, kind: str
) -> None:
    tree = build(explored, max_nodes, tree=kind)
    assert_trees(tree, root_tokens(explored), max_nodes + 1)
    for request in range(len(explored.tokens)):
        log_probs = allowed_log_probs(explored, request, kind)
        prefixes = prefixes_of(tree, request)
        assert len(set(prefixes)) == len(prefixes)
        # Of two equally probable nodes on one level, either may be kept.
        order = [(log_probs[prefix], len(prefix)) for prefix in prefixes]
        best = naive.best_nodes(log_probs, max_nodes)
        assert order == [(log_probs[prefix], len(prefix)) for prefix in best]


@drawn
@given(explored_nodes(), max_nodes_of_a_tree, KINDS | st.just("chain"), st.data())
def test_a_chain_is_a_best_path_and_leaves_other_requests_alone(
    explored: ExploredNodes, max_nodes: int, kind: str, data: st.DataObject
) -> None:
    requests = len(explored.tokens)
    chain = data.draw(st.lists(st.booleans(), min_size=requests, max_size=requests))
    tree = build(explored, max_nodes, tree=kind, chain=torch.tensor(chain))
    free = build(explored, max_nodes, tree=kind)
    assert_trees(tree, root_tokens(explored), max_nodes + 1)
    for request in range(requests):
        if not chain[request] and kind != "chain":
            assert prefixes_of(tree, request) == prefixes_of(free, request)
            continue
        found = allowed_log_probs(explored, request, kind)
        expected = {
            path: sum(math.exp(found[path[:depth]]) for depth in range(1, len(path) + 1))
            for path in found
        }
        most = max(expected.values(), default=0.0)
        best = [path for path in found if expected[path] > most - 1e-5]
        assert prefixes_of(tree, request) in [
            [path[:depth] for depth in range(1, min(len(path), max_nodes) + 1)]
            for path in best or [()]
        ]


def test_a_full_chain_has_every_bit_of_every_word() -> None:
    """A word is an int32: all 32 bits are -1, bit 31 alone is -2**31."""
    count = torch.arange(127).view(1, 127, 1)
    tree = build(ExploredNodes(count, torch.zeros_like(count), -count.float()), 127)
    assert_trees(tree, torch.tensor([100]), 128)
    words = tree.ancestors[0].tolist()
    assert words[30] == [2**31 - 1, 0, 0, 0] and words[31] == [-1, 0, 0, 0]
    assert words[32] == [-1, 1, 0, 0] and words[127] == [-1, -1, -1, -1]


@pytest.mark.parametrize(("max_nodes", "shape"), [(4, (1, 4)), (5, (3, 5)), (12, (3, 5))])
def test_a_step_of_fewer_nodes_than_a_beam_is_long_drafts_the_best_beam_alone(
    max_nodes: int, shape: tuple[int, int]
) -> None:
    assert search_shape(ReDrafterConfig(12, beam_width=3, beam_length=5), max_nodes) == shape
