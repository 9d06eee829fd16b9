"""What is timed is attention: of trees, and of chains of as many rows."""

from __future__ import annotations

import torch
from cpu_parts.attention import Attention, Layers

LAYERS = Layers(count=2, heads=4, kv_heads=2, head_size=32)


def test_a_tree_of_a_root_and_one_node_is_the_chain() -> None:
    attention = Attention(LAYERS, requests=3, context=140, nodes=2)
    tree = attention.tree().clone()
    torch.testing.assert_close(tree, attention.chain(), rtol=1e-4, atol=1e-5)


def test_of_a_larger_tree_only_the_first_branch_is_the_chain_s() -> None:
    attention = Attention(LAYERS, requests=2, context=20, nodes=7)
    tree = attention.tree().clone().view(2, 7, -1)
    chain = attention.chain().view(2, 7, -1)
    torch.testing.assert_close(tree[:, :2], chain[:, :2], rtol=1e-4, atol=1e-5)
    assert not torch.isclose(tree[:, 2:], chain[:, 2:], rtol=1e-2).all(dim=2).any()


def test_the_trees_are_binary() -> None:
    trees = Attention(LAYERS, requests=2, context=3, nodes=7).trees()
    assert trees.parents.tolist() == 2 * [[0, 0, 0, 1, 1, 2, 2]]
    assert trees.depths.tolist() == 2 * [[0, 1, 1, 2, 2, 2, 2]]


def test_bytes_are_those_of_k_and_v() -> None:
    layers = Layers(count=5, heads=4, kv_heads=2, head_size=32, dtype=torch.bfloat16)
    tokens = 3 * (20 + 7)
    assert Attention(layers, 3, 20, 7).num_bytes() == 5 * tokens * 2 * (2 * 32) * 2
