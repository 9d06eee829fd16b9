# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk on the host, what it moves and teaches: compiled passes over the nodes.

`tree/acceptance.py` says it in torch for any device, and is what a test holds this to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.utils.compiled import compiled

Array = npt.NDArray[Any]


class Walk:
    """The acceptance walk of one step, from depth to depth: `acceptance.accept_path`.

    Use: while there are `requests`, sample at their `nodes`, and `go_on` with what was drawn.

    Attributes:
        requests: [A] int64, ascending, those whose path goes on; at first all R.
        nodes: [A] int64, the nodes that their paths have come to.
        depth: of these nodes.
        accepted: what has been walked so far.
    """

    def __init__(self, tree: TokenTree) -> None:
        """Stand at each root."""
        tokens, parents, _, num_nodes = _arrays(tree)
        self._tree = tokens, parents, num_nodes
        requests, slots = tree.tokens.shape
        self._output = np.full((requests, slots), -1, dtype=np.int32)
        self._num_sampled = np.zeros(requests, dtype=np.int32)
        self._path = np.full((requests, slots), -1, dtype=np.int64)
        self._last_node = np.zeros(requests, dtype=np.int64)
        self.accepted = AcceptedPath(
            *map(torch.from_numpy, (self._output, self._num_sampled, self._path, self._last_node))
        )
        self.requests = np.arange(requests)
        self.nodes = np.zeros(requests, dtype=np.int64)
        self.depth = 0

    def go_on(self, sampled: Tensor) -> None:
        """Walk to those children that carry the tokens sampled, [A] int32, at `nodes`."""
        self._output[self.requests, self.depth] = sampled.numpy()
        self._path[self.requests, self.depth] = self.nodes
        self._num_sampled[self.requests] = self.depth + 1
        self._last_node[self.requests] = self.nodes
        children = _children(*self._tree, self.requests, self.nodes, sampled.numpy())
        goes_on = children >= 0
        self.requests, self.nodes = self.requests[goes_on], children[goes_on]
        self.depth += 1

    def output_of(self, request: int) -> list[int]:
        """What was sampled for a request whose path goes on."""
        found: list[int] = self._output[request, : self.depth].tolist()
        return found


def moves(path: Tensor, first_row: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that compaction has to move: those whose path leaves the linear order.

    Args:
        path: [R, T] int64, accepted nodes in depth order, -1 after them.
        first_row: [R] int64, the flat row of each root.

    Returns:
        (source rows [N], destination rows [N]), flat; N = 0 where all paths are in place.
    """
    source, destination = _moves(path.numpy(), first_row.numpy())
    return torch.from_numpy(source), torch.from_numpy(destination)


def judged_nodes(
    tree: TokenTree, path: Tensor, sources: npt.NDArray[np.float32]
) -> tuple[Array, Array, Array, Array, Array]:
    """The nodes that a walk judged: those whose parent was accepted.

    Args:
        tree: the verified trees.
        path: [R, T] int64, see `AcceptedPath`.
        sources: [R, 2, T], each node's log-odds by the draft, and the length of its match.

    Returns:
        Of N judged nodes: request [N] int64, log-odds [N] float32, lengths of matches [N] int64,
        depths [N] int32, whether accepted [N] bool.
    """
    judged: tuple[Array, ...] = _judged(*_arrays(tree), path.numpy(), sources)
    return judged  # type: ignore[return-value]


def accepted_nodes(
    sampled: Array,
    survival: Array,
    drafted: TokenTree,
    tree: TokenTree,
    accepted: AcceptedPath,
) -> tuple[tuple[float, float], tuple[float, float]]:
    """How many nodes were expected to be accepted, and how many were.

    Args:
        sampled: [R] bool, requests that sample.
        survival: [R, K+1] float32, survival probabilities of roots and nodes to be verified.
        drafted: their trees.
        tree: what was verified; a request with fewer nodes, as a grammar ruled some out or the
            model's length did, is left out.
        accepted: what came of it.

    Returns:
        (expected, accepted), each of requests that do not sample, and of those that do.
    """
    counts = drafted.num_nodes.numpy(), tree.num_nodes.numpy(), accepted.num_sampled.numpy()
    return _accepted_nodes(sampled, survival, *map(np.ascontiguousarray, counts))


def _arrays(tree: TokenTree) -> tuple[Array, Array, Array, Array]:
    """Tokens, parents, depths and numbers of nodes, in the one layout that is compiled for."""
    return (
        np.ascontiguousarray(tree.tokens.numpy()),
        np.ascontiguousarray(tree.parents.numpy()),
        np.ascontiguousarray(tree.depths.numpy()),
        np.ascontiguousarray(tree.num_nodes.numpy()),
    )


@compiled
def _children(
    tokens: Array, parents: Array, num_nodes: Array, requests: Array, nodes: Array, sampled: Array
) -> Array:
    """Of each node the child that carries its token; -1 where there is none."""
    children = np.full(requests.size, -1, dtype=np.int64)
    for i in range(requests.size):
        r, node = requests[i], nodes[i]
        # Parents stand before their children, and siblings carry different tokens.
        for other in range(node + 1, num_nodes[r]):
            if parents[r, other] == node and tokens[r, other] == sampled[i]:
                children[i] = other
                break
    return children


@compiled
def _moves(path: Array, first_row: Array) -> tuple[Array, Array]:
    source = np.empty(path.size, dtype=np.int64)
    destination = np.empty(path.size, dtype=np.int64)
    count = 0
    for r in range(path.shape[0]):
        for depth in range(path.shape[1]):
            if path[r, depth] >= 0 and path[r, depth] != depth:
                source[count] = first_row[r] + path[r, depth]
                destination[count] = first_row[r] + depth
                count += 1
    return source[:count].copy(), destination[:count].copy()


@compiled
def _judged(
    tokens: Array, parents: Array, depths: Array, num_nodes: Array, path: Array, sources: Array
) -> tuple[Array, Array, Array, Array, Array]:
    most = tokens.size
    of_match = np.empty(most, dtype=np.int64)
    of_request = np.empty(most, dtype=np.int64)
    of_log_odds = np.empty(most, dtype=np.float32)
    of_depth = np.empty(most, dtype=np.int32)
    accepted = np.empty(most, dtype=np.bool_)
    count = 0
    for r in range(tokens.shape[0]):
        for node in range(1, num_nodes[r]):
            above = parents[r, node]
            # The scheduler's padding, -1, was never drafted.
            if tokens[r, node] >= 0 and path[r, depths[r, above]] == above:
                of_request[count] = r
                of_log_odds[count] = sources[r, 0, node]
                of_match[count] = int(sources[r, 1, node])
                of_depth[count] = depths[r, node]
                accepted[count] = path[r, depths[r, node]] == node
                count += 1
    return (
        of_request[:count],
        of_log_odds[:count],
        of_match[:count],
        of_depth[:count],
        accepted[:count],
    )


@compiled
def _accepted_nodes(
    sampled: Array, survival: Array, drafted: Array, verified: Array, num_sampled: Array
) -> tuple[tuple[float, float], tuple[float, float]]:
    expected, accepted = np.zeros(2), np.zeros(2)
    for r in range(drafted.shape[0]):
        if drafted[r] > 1 and verified[r] == drafted[r]:
            kind = 1 if sampled[r] else 0
            expected[kind] += survival[r, 1 : drafted[r]].sum()
            accepted[kind] += num_sampled[r] - 1
    return (expected[0], expected[1]), (accepted[0], accepted[1])
