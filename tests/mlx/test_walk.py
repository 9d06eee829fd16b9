# SPDX-License-Identifier: Apache-2.0
"""The walk in MLX accepts what it accepts in torch, whose losslessness tests/tree shows."""

import random

import mlx.core as mx
import pytest
import torch

from redrafter_testing.algorithm.tree_batches import grown_tree, token_trees
from vllm_redrafter.mlx.step import accept_path
from vllm_redrafter.tree.acceptance import accept_path as torch_accept_path

VOCAB, ROOT = 3, 100


@pytest.mark.parametrize("seed", range(100))
def test_the_accepted_path_is_torchs(seed: int) -> None:
    rng = random.Random(seed)
    draws = [(rng.randrange(30), rng.randrange(VOCAB)) for _ in range(rng.randrange(30))]
    tokens, parents = grown_tree(draws, ROOT)
    tree = token_trees([parents], len(parents), [tokens])
    sampled = torch.tensor([[rng.randrange(VOCAB) for _ in tree.tokens[0]]], dtype=torch.int32)
    # Some have room for more levels than the tree has.
    max_depth = int(tree.depths.max()) + rng.randrange(3)
    fields = tree.tokens, tree.parents, tree.depths, tree.ancestor_mask, sampled
    found = accept_path(*(mx.array(field[0].numpy()) for field in fields), max_depth)
    assert all(array.dtype == mx.int32 for array in found)
    expected = torch_accept_path(tree, sampled)
    length, last_node = int(expected.num_sampled), int(expected.last_node)
    assert (found.length.item(), found.last_node.item()) == (length, last_node)
    path = expected.path[0, :length].tolist()
    assert found.path.tolist() == path + [last_node] * (max_depth + 1 - length)


def test_nothing_is_evaluated_in_a_walk() -> None:
    """MLX refuses to evaluate anything while it traces a function."""
    chain = mx.array([ROOT, 1, 2]), mx.array([0, 0, 1]), mx.array([0, 1, 2]), mx.tri(3) > 0
    accepted = mx.compile(lambda sampled: list(accept_path(*chain, sampled, 2)))
    assert [array.shape for array in accepted(mx.array([1, 2, 0]))] == [(3,), (), ()]
