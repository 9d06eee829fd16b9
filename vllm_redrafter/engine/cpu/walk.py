"""The acceptance walk on the host, and what it teaches, in one pass over the nodes each.

`acceptance.py` says it in torch for any device, and is what a test holds this to; about numba see
`ranking.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_redrafter.acceptance import AcceptedPath
from vllm_redrafter.compiled import compiled
from vllm_redrafter.token_tree import TokenTree

Array = npt.NDArray[Any]


def walk(tree: TokenTree, sampled: Tensor) -> AcceptedPath:
    """See `acceptance.accept_path`."""
    walked = _walk(*_arrays(tree), np.ascontiguousarray(sampled.numpy()))
    return AcceptedPath(*map(torch.from_numpy, walked))


def judged_nodes(
    tree: TokenTree, path: Tensor, odds: npt.NDArray[np.float32]
) -> tuple[Array, Array, Array]:
    """The nodes that a walk judged: those whose parent was accepted.

    Args:
        tree: the verified trees.
        path: [R, T] int64, see `AcceptedPath`.
        odds: [R, T], the draft's log-odds of each node.

    Returns:
        Of N judged nodes: log-odds [N] float32, depths [N] int32, whether accepted [N] bool.
    """
    judged: tuple[Array, Array, Array] = _judged(*_arrays(tree), path.numpy(), odds)
    return judged


def _arrays(tree: TokenTree) -> tuple[Array, Array, Array, Array]:
    """Tokens, parents, depths and numbers of nodes, in the one layout that is compiled for."""
    return (
        np.ascontiguousarray(tree.tokens.numpy()),
        np.ascontiguousarray(tree.parents.numpy()),
        np.ascontiguousarray(tree.depths.numpy()),
        np.ascontiguousarray(tree.num_nodes.numpy()),
    )


@compiled
def _walk(
    tokens: Array, parents: Array, depths: Array, num_nodes: Array, sampled: Array
) -> tuple[Array, Array, Array, Array]:
    requests, slots = tokens.shape
    output = np.full((requests, slots), -1, dtype=np.int32)
    num_sampled = np.zeros(requests, dtype=np.int32)
    path = np.full((requests, slots), -1, dtype=np.int64)
    last_node = np.zeros(requests, dtype=np.int64)
    for r in range(requests):
        node = 0
        # Parents stand before their children, and siblings carry different tokens: from a node on
        # the path, the next is the first behind it that continues it.
        for other in range(num_nodes[r]):
            continues = parents[r, other] == node and tokens[r, other] == sampled[r, node]
            if other == 0 or continues:
                node = other
                path[r, depths[r, node]] = node
                output[r, depths[r, node]] = sampled[r, node]
        last_node[r] = node
        num_sampled[r] = depths[r, node] + 1
    return output, num_sampled, path, last_node


@compiled
def _judged(
    tokens: Array, parents: Array, depths: Array, num_nodes: Array, path: Array, odds: Array
) -> tuple[Array, Array, Array]:
    most = tokens.size
    of_odds = np.empty(most, dtype=np.float32)
    of_depth = np.empty(most, dtype=np.int32)
    accepted = np.empty(most, dtype=np.bool_)
    count = 0
    for r in range(tokens.shape[0]):
        for node in range(1, num_nodes[r]):
            above = parents[r, node]
            # The scheduler's padding, -1, was never drafted.
            if tokens[r, node] >= 0 and path[r, depths[r, above]] == above:
                of_odds[count] = odds[r, node]
                of_depth[count] = depths[r, node]
                accepted[count] = path[r, depths[r, node]] == node
                count += 1
    return of_odds[:count], of_depth[:count], accepted[:count]
