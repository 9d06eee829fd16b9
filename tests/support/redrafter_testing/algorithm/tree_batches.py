# SPDX-License-Identifier: Apache-2.0
"""Trees of given shapes, for tests of the kernels. One tree is the list of its nodes' parents."""

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vllm_redrafter.tree.token_tree import TokenTree

GARBAGE = 2**31 - 7
"""As an index or a token, nothing that exists."""


def chain(nodes: int) -> list[int]:
    return [0, *range(nodes - 1)]


def star(nodes: int) -> list[int]:
    return [0] * nodes


def bushy(nodes: int, seed: int = 0) -> list[int]:
    """Any earlier node may be a node's parent."""
    rng = random.Random(seed)
    return [0, *(rng.randrange(node) for node in range(1, nodes))]


def grown_tree(draws: Iterable[tuple[int, int]], root: int) -> tuple[list[int], list[int]]:
    """(tokens, parents): a node per (choice of its parent, token), unless a sibling has it."""
    tokens, parents = [root], [0]
    for choice, token in draws:
        parent = choice % len(tokens)
        if (parent, token) not in zip(parents[1:], tokens[1:], strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def token_trees(
    parents: Sequence[Sequence[int]], slots: int, tokens: Sequence[Sequence[int]] | None = None
) -> TokenTree:
    """The trees as a TokenTree fills its tensors; without tokens, a node's token is its index."""
    requests = len(parents)
    all_tokens = torch.full((requests, slots), -1, dtype=torch.int32)
    all_parents = torch.zeros(requests, slots, dtype=torch.int32)
    depths = torch.zeros(requests, slots, dtype=torch.int32)
    for request, tree in enumerate(parents):
        nodes = len(tree)
        own = range(nodes) if tokens is None else tokens[request]
        all_tokens[request, :nodes] = torch.tensor(list(own))
        all_parents[request, :nodes] = torch.tensor(list(tree))
        for node in range(1, nodes):
            depths[request, node] = depths[request, tree[node]] + 1
    num_nodes = torch.tensor([len(tree) for tree in parents], dtype=torch.int32)
    return TokenTree(all_tokens, all_parents, depths, num_nodes)


def first_nodes(tree: TokenTree, num_nodes: Tensor) -> TokenTree:
    """The same trees, cut to so many nodes each, [R], the root counted."""
    kept = torch.minimum(tree.num_nodes, num_nodes.int())
    cut = torch.arange(tree.tokens.shape[1]) >= kept.unsqueeze(1)
    fields = (tree.tokens, -1), (tree.parents, 0), (tree.depths, 0)
    return TokenTree(*(field.masked_fill(cut, unused) for field, unused in fields), kept)


def poisoned(field: Tensor, tree: TokenTree) -> Tensor:
    """A copy of one of the tree's tensors, [R, T, ...], with garbage in the unused slots."""
    field = field.clone()
    field[~tree.is_node] = GARBAGE
    return field


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, with a last dimension that is not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]
