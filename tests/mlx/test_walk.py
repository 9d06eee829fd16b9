# SPDX-License-Identifier: Apache-2.0
"""The walk in MLX accepts what it accepts in torch, whose losslessness tests/tree shows."""

import mlx.core as mx
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter_testing.algorithm.random_trees import ROOT, scored_trees
from vllm_redrafter.mlx.step import accept_path
from vllm_redrafter.tree.acceptance import accept_path as torch_accept_path
from vllm_redrafter.tree.token_tree import TokenTree


@settings(deadline=None)
@given(scored_trees(), st.integers(0, 2))
def test_the_accepted_path_is_torchs(scored: tuple[TokenTree, torch.Tensor], more: int) -> None:
    """Some have room for `more` levels than the tree has."""
    tree, sampled = scored[0], scored[1].int()
    count, max_depth = int(tree.num_nodes[0]), int(tree.depths[0].max()) + more
    fields = [field[0, :count] for field in (tree.tokens, tree.parents, tree.depths)]
    fields += [tree.ancestor_mask[0, :count, :count], sampled[0, :count]]
    found = accept_path(*(mx.array(field.numpy()) for field in fields), max_depth)
    assert all(array.dtype == mx.int32 for array in found)
    expected = torch_accept_path(tree, sampled)
    length, last_node = int(expected.num_sampled[0]), int(expected.last_node[0])
    assert (found.length.item(), found.last_node.item()) == (length, last_node)
    path = expected.path[0, :length].tolist()
    assert found.path.tolist() == path + [last_node] * (max_depth + 1 - length)


def test_nothing_is_evaluated_in_a_walk() -> None:
    """MLX refuses to evaluate anything while it traces a function."""
    chain = mx.array([ROOT, 1, 2]), mx.array([0, 0, 1]), mx.array([0, 1, 2]), mx.tri(3) > 0
    accepted = mx.compile(lambda sampled: list(accept_path(*chain, sampled, 2)))
    assert [array.shape for array in accepted(mx.array([1, 2, 0]))] == [(3,), (), ()]
