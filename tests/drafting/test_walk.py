# SPDX-License-Identifier: Apache-2.0
"""The compiled walk against the torch function that says what it computes."""

import numpy as np
import torch
from hypothesis import given, settings

from redrafter_testing.algorithm.random_trees import scored_trees
from redrafter_testing.algorithm.tree_batches import token_trees
from vllm_redrafter.drafting.walk import Walk, accepted_nodes, judged_nodes
from vllm_redrafter.tree.acceptance import AcceptedPath, accept_path
from vllm_redrafter.tree.token_tree import TokenTree


def walked(tree: TokenTree, sampled: torch.Tensor) -> AcceptedPath:
    """By what would be sampled at each node, [R, T]."""
    walk = Walk(tree)
    while len(walk.requests):
        walk.go_on(sampled[walk.requests, walk.nodes])
    return walk.accepted


@settings(deadline=None)
@given(scored_trees())
def test_the_walk_is_that_of_the_torch_function(scored: tuple[TokenTree, torch.Tensor]) -> None:
    tree, sampled = scored[0], scored[1].int()
    expected, found = accept_path(tree, sampled), walked(tree, sampled)
    assert torch.equal(found.output_tokens, expected.output_tokens)
    assert torch.equal(found.num_sampled, expected.num_sampled)
    assert torch.equal(found.path, expected.path)
    assert torch.equal(found.last_node, expected.last_node)
    assert [part.dtype for part in vars(found).values()] == [
        part.dtype for part in vars(expected).values()
    ]


def test_the_judged_nodes_are_those_whose_parent_was_accepted() -> None:
    #        0
    #    1       2       path: 0, 2, 5; 6 is the scheduler's padding
    #  3   4     5
    #            6
    parents = torch.tensor([[0, 0, 0, 1, 1, 2, 5, 0]], dtype=torch.int32)
    depths = torch.tensor([[0, 1, 1, 2, 2, 2, 3, 0]], dtype=torch.int32)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5, -1, -1]], dtype=torch.int32)
    tree = TokenTree(tokens, parents, depths, torch.tensor([7], dtype=torch.int32))
    sampled = torch.tensor([[2, 9, 5, 9, 9, 9, 9, 0]], dtype=torch.int32)
    accepted = walked(tree, sampled)
    sources = np.arange(16, dtype=np.float32).reshape(1, 2, 8)
    of_request, judged, match_classes, judged_depths, was_accepted = judged_nodes(
        tree, accepted.path, sources
    )
    assert of_request.tolist() == [0, 0, 0]
    assert judged.tolist() == [1, 2, 5]
    assert match_classes.tolist() == [9, 10, 13]
    assert judged_depths.tolist() == [1, 1, 2]
    assert was_accepted.tolist() == [False, True, True]


def test_expected_and_accepted_nodes_are_counted_by_kind_of_request() -> None:
    chain, cut_short = [0, 0, 1, 2], [0, 0]
    tree = token_trees([chain, chain, cut_short, chain, [0]], 4)
    accepted = AcceptedPath(
        output_tokens=torch.empty(5, 4, dtype=torch.int32),
        num_sampled=torch.tensor([4, 2, 2, 1, 1], dtype=torch.int32),
        path=torch.empty(5, 4, dtype=torch.int64),
        last_node=torch.empty(5, dtype=torch.int64),
    )
    survival = np.array([[1.0, 0.5, 0.25, 0.125, 0.0625]] * 5, dtype=np.float32)
    # Of the third, vLLM has verified fewer than were to be; of the last, none were.
    drafted = token_trees([chain, chain, chain, chain, [0]], 4)
    sampled = np.array([False, True, False, True, False])
    found = accepted_nodes(sampled, survival, drafted, tree, accepted)
    assert found == ((0.875, 2 * 0.875), (3.0, 1.0))
