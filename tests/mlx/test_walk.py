# SPDX-License-Identifier: Apache-2.0
"""The walk in MLX accepts what it accepts in torch, and loses nothing of the distribution."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core")

from redrafter_testing.algorithm import naive
from vllm_redrafter.mlx.step import AcceptedPath, accept_path
from vllm_redrafter.tree.acceptance import accept_path as torch_accept_path
from vllm_redrafter.tree.token_tree import TokenTree

VOCAB, ROOT = 3, 100

Nodes = tuple[list[int], list[int]]
"""Tokens and parents of a tree, parents before children, siblings with different tokens."""
Walk = Callable[..., AcceptedPath]


def random_nodes(rng: random.Random, most: int) -> Nodes:
    tokens, parents = [ROOT], [0]
    for _ in range(rng.randrange(most)):
        parent, token = rng.randrange(len(tokens)), rng.randrange(VOCAB)
        if (parent, token) not in zip(parents[1:], tokens[1:], strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def tree_of(nodes: Nodes) -> TokenTree:
    tokens, parents = nodes
    depths = [len(prefix) for prefix in naive.node_prefixes(tokens, parents, len(tokens))]
    columns = [torch.tensor([column], dtype=torch.int32) for column in (tokens, parents, depths)]
    return TokenTree(*columns, torch.tensor([len(tokens)], dtype=torch.int32))


def walked(
    nodes: Nodes, sampled: list[int], walk: Walk = accept_path, spare: int = 0
) -> tuple[list[int], int, int]:
    """(path, length, last node), with room for `spare` levels more than the tree has."""
    tree = tree_of(nodes)
    arrays = [mx.array(column[0].numpy()) for column in (tree.tokens, tree.parents, tree.depths)]
    sees, max_depth = mx.array(tree.ancestor_mask[0].numpy()), int(tree.depths.max()) + spare
    found = walk(*arrays, sees, mx.array(sampled, dtype=mx.int32), max_depth)
    assert all(array.dtype == mx.int32 for array in found)
    assert found.path.shape == (max_depth + 1,) and found.length.shape == ()
    return found.path.tolist(), found.length.item(), found.last_node.item()


def in_torch(nodes: Nodes, sampled: list[int], spare: int = 0) -> tuple[list[int], int, int]:
    tree = tree_of(nodes)
    accepted = torch_accept_path(tree, torch.tensor([sampled]))
    length, last_node = int(accepted.num_sampled), int(accepted.last_node)
    path = accepted.path[0, :length].tolist()
    slots = int(tree.depths.max()) + 1 + spare
    return path + [last_node] * (slots - length), length, last_node


@pytest.mark.parametrize("seed", range(100))
def test_the_accepted_path_is_torchs(seed: int) -> None:
    rng = random.Random(seed)
    nodes = random_nodes(rng, most=30)
    sampled = [rng.randrange(VOCAB) for _ in nodes[0]]
    spare = rng.randrange(3)
    assert walked(nodes, sampled, spare=spare) == in_torch(nodes, sampled, spare)


def test_nothing_is_evaluated_in_a_walk() -> None:
    """MLX refuses to evaluate anything while it traces a function."""
    chain = mx.array([ROOT, 1, 2]), mx.array([0, 0, 1]), mx.array([0, 1, 2]), mx.tri(3) > 0
    accepted = mx.compile(lambda sampled: list(accept_path(*chain, sampled, 2)))
    assert [array.shape for array in accepted(mx.array([1, 2, 0]))] == [(3,), (), ()]


# --- Losslessness: an exact enumeration of everything that the target may sample. ---


def target(prefix: tuple[int, ...]) -> list[float]:
    """A language model over VOCAB tokens: an arbitrary, but fixed, distribution per context."""
    weights = np.random.default_rng([7, *prefix]).random(VOCAB) + 0.05
    return (weights / weights.sum()).tolist()


def first_tokens(nodes: Nodes, walk: Walk) -> dict[tuple[int, ...], float]:
    """The distribution of the first two tokens, of one step and what is decoded plainly then."""
    tokens, parents = nodes
    contexts = naive.node_prefixes(tokens, parents, len(tokens))
    total: dict[tuple[int, ...], float] = defaultdict(float)
    for sampled in itertools.product(range(VOCAB), repeat=len(tokens)):
        probability = np.prod([target(c)[t] for c, t in zip(contexts, sampled, strict=True)])
        path, length, _ = walked(nodes, list(sampled), walk)
        output = tuple(sampled[node] for node in path[:length])[:2]
        rest = enumerate(target(output)) if len(output) == 1 else ((None, 1.0),)
        for token, p in rest:
            total[output if token is None else (*output, token)] += probability * p
    return total


def worst_error(nodes: Nodes, walk: Walk) -> float:
    found = first_tokens(nodes, walk)
    return max(
        abs(found.get((a, b), 0.0) - target(())[a] * target((a,))[b])
        for a, b in itertools.product(range(VOCAB), repeat=2)
    )


def accept_any_match(
    tokens: mx.array,
    parents: mx.array,
    depths: mx.array,
    sees: mx.array,
    sampled: mx.array,
    max_depth: int,
) -> AcceptedPath:
    """A wrong walk: below a node that was rejected, it goes on."""
    return accept_path(tokens, parents, depths, mx.eye(len(tokens)) > 0, sampled, max_depth)


TREES = {
    "chain": ([ROOT, 0, 1], [0, 0, 1]),
    "branches": ([ROOT, 0, 1, 1, 0], [0, 0, 0, 1, 2]),
    "all children of the root": ([ROOT, 0, 1, 2], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("nodes", TREES.values(), ids=TREES.keys())
def test_the_output_has_the_targets_distribution(nodes: Nodes) -> None:
    assert worst_error(nodes, accept_path) < 1e-12


def test_a_walk_that_ignores_rejected_ancestors_has_another_distribution() -> None:
    """Negative control: the enumeration tells the exact rule from a wrong one."""
    assert worst_error(TREES["branches"], accept_any_match) > 0.01
