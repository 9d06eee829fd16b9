# SPDX-License-Identifier: Apache-2.0
"""`tree/acceptance.py` on the host, and what a walk moves and teaches: compiled loops."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.utils.compiled import Array, compiled


class Walk:
    """The acceptance walk of one step, from depth to depth, beginning at each root.

    Use: while there are `requests`, sample at their `nodes`, and `go_on` with what was drawn.

    Attributes:
        requests, nodes: [A] int64, requests whose path goes on, ascending, and where it has come.
        depth: of these nodes.
        accepted: what has been walked so far.
    """

    def __init__(self, tree: TokenTree) -> None:
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


def moves(path: Tensor, first_row: Tensor) -> tuple[Tensor, Tensor]:
    """(sources [N], destinations [N]) of the cache rows that compaction has to move.

    Args:
        path: [R, T] int64, accepted nodes in depth order, -1 after them.
        first_row: [R] int64, the flat row of each root.
    """
    source, destination = _moves(path.numpy(), first_row.numpy())
    return torch.from_numpy(source), torch.from_numpy(destination)


def judged_nodes(
    tree: TokenTree, path: Tensor, sources: npt.NDArray[np.float32]
) -> tuple[Array, Array, Array, Array, Array]:
    """The N nodes that a walk judged: those whose parent was accepted.

    `sources`, [R, 2, T], are each node's log-odds by the draft, and the length of its match.

    Returns:
        request [N] int64, log-odds [N] float32, lengths of matches [N] int64, depths [N] int32,
        whether accepted [N] bool.
    """
    judged: tuple[Array, ...] = _judged(*_arrays(tree), path.numpy(), sources)
    return judged  # type: ignore[return-value]


def accepted_nodes(
    sampled: Array, survival: Array, drafted: TokenTree, tree: TokenTree, accepted: AcceptedPath
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(expected, accepted) nodes, each of greedy requests and of those that sample.

    Args:
        sampled: [R] bool, requests that sample.
        survival: [R, K+1] float32, survival probabilities of the drafted trees.
        drafted, tree: the trees, and what of them was verified; requests with fewer nodes verified
            (ruled out by a grammar, or the model's length) are left out.
        accepted: what came of it.
    """
    counts = drafted.num_nodes.numpy(), tree.num_nodes.numpy(), accepted.num_sampled.numpy()
    return _accepted_nodes(sampled, survival, *map(np.ascontiguousarray, counts))


def _arrays(tree: TokenTree) -> tuple[Array, Array, Array, Array]:
    """Tokens, parents, depths and numbers of nodes, in the one layout that is compiled for."""
    parts = tree.tokens, tree.parents, tree.depths, tree.num_nodes
    tokens, parents, depths, num_nodes = (np.ascontiguousarray(part.numpy()) for part in parts)
    return tokens, parents, depths, num_nodes


@compiled
def _children(
    tokens: Array, parents: Array, num_nodes: Array, requests: Array, nodes: Array, sampled: Array
) -> Array:
    """Each node's child that carries its sampled token; -1 for none."""
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
    size = tokens.size
    match_classes = np.empty(size, dtype=np.int64)
    request = np.empty(size, dtype=np.int64)
    log_odds = np.empty(size, dtype=np.float32)
    depth = np.empty(size, dtype=np.int32)
    accepted = np.empty(size, dtype=np.bool_)
    count = 0
    for r in range(tokens.shape[0]):
        for node in range(1, num_nodes[r]):
            above = parents[r, node]
            # The scheduler's padding, -1, was never drafted.
            if tokens[r, node] >= 0 and path[r, depths[r, above]] == above:
                request[count] = r
                log_odds[count] = sources[r, 0, node]
                match_classes[count] = int(sources[r, 1, node])
                depth[count] = depths[r, node]
                accepted[count] = path[r, depths[r, node]] == node
                count += 1
    judged = request[:count], log_odds[:count], match_classes[:count]
    return (*judged, depth[:count], accepted[:count])


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
