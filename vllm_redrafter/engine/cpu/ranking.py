"""The trees of a search, ranked by how probable their nodes are to be accepted, in one pass.

The mathematics is that of `budget/calibration.py` and `token_tree.py`, which say it in torch for
any device. A step of a small target takes a few milliseconds, of which some hundred calls of torch
on a few dozen numbers are a large part; numba compiles the loops. A test holds the two equal.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_redrafter.budget.calibration import MAX_LOG_ODDS
from vllm_redrafter.compiled import compiled
from vllm_redrafter.token_tree import TokenTree

Array = npt.NDArray[Any]


@compiled
def ranked_nodes(
    roots: Array,
    tokens: Array,
    back_pointers: Array,
    log_probs: Array,
    allowed: Array,
    sampled: Array,
    slopes: Array,
    biases: Array,
    most: Array,
    max_nodes: int,
) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
    """Select each request's most probable nodes.

    Args:
        roots: [R] int64, the last sampled tokens.
        tokens, back_pointers: [R, L, W] int64, of the search.
        log_probs: [R, L, W] float32, cumulative; -inf where there is no node.
        allowed: [R, L, W] float32: -inf for nodes that may not be in the tree; a node's parent may
            be, if it may.
        sampled: [R] bool, requests that sample.
        slopes, biases: [2] and [2, L or more] float32, of the acceptance models of requests that do
            not sample, and of those that do.
        most: [R] int64, the most nodes of each request, roots not counted; at most K.
        max_nodes: K.

    Returns:
        tokens, parents, depths: [R, K+1] int32, of the trees (see `TokenTree`).
        num_nodes: [R] int32, roots counted.
        odds: [R, K+1] float32, the draft's log-odds of each node given its parent; 0 for the root.
        survival: [R, K+1] float32; 1 for the root, 0 in unused slots.
        explored: [R, L, W] float32, the survival probabilities of all that was visited.
    """
    odds, log_survival = _scored(back_pointers, log_probs, sampled, slopes, biases)
    scores = np.where(allowed == -np.inf, allowed, log_survival)
    trees = selected_nodes(roots, tokens, back_pointers, scores, most, max_nodes)
    tree_tokens, parents, depths, num_nodes, order = trees
    node_odds = np.zeros(tree_tokens.shape, dtype=np.float32)
    survival = np.zeros(tree_tokens.shape, dtype=np.float32)
    width = tokens.shape[2]
    for r in range(len(roots)):
        survival[r, 0] = 1.0
        for node in range(1, num_nodes[r]):
            level, beam = order[r, node - 1] // width, order[r, node - 1] % width
            node_odds[r, node] = odds[r, level, beam]
            survival[r, node] = math.exp(log_survival[r, level, beam])
    return tree_tokens, parents, depths, num_nodes, node_odds, survival, np.exp(log_survival)


@compiled
def _scored(
    back_pointers: Array, log_probs: Array, sampled: Array, slopes: Array, biases: Array
) -> tuple[Array, Array]:
    """[R, L, W] float32 each: the draft's log-odds given the parent, the logs of survival."""
    odds = np.full(log_probs.shape, -MAX_LOG_ODDS, dtype=np.float32)
    log_survival = np.full(log_probs.shape, -np.inf, dtype=np.float32)
    requests, length, width = log_probs.shape
    for r in range(requests):
        kind = 1 if sampled[r] else 0
        for level in range(length):
            for beam in range(width):
                if log_probs[r, level, beam] == -np.inf:
                    continue
                above, log_survival_above = 0.0, 0.0
                if level:
                    parent = back_pointers[r, level, beam]
                    above = log_probs[r, level - 1, parent]
                    log_survival_above = log_survival[r, level - 1, parent]
                given_parent = min(log_probs[r, level, beam] - above, 0.0)
                denominator = -math.expm1(given_parent)
                f = MAX_LOG_ODDS
                if denominator > 0.0:
                    f = given_parent - math.log(denominator)
                f = max(-MAX_LOG_ODDS, min(f, MAX_LOG_ODDS))
                odds[r, level, beam] = f
                # The log of the sigmoid; its argument is bounded as the log-odds are.
                accepted = -math.log1p(math.exp(-(slopes[kind] * f + biases[kind, level])))
                log_survival[r, level, beam] = log_survival_above + accepted
    return odds, log_survival


@compiled
def selected_nodes(
    roots: Array, tokens: Array, back_pointers: Array, scores: Array, most: Array, max_nodes: int
) -> tuple[Array, Array, Array, Array, Array]:
    """See `token_tree.select_nodes`.

    Args:
        roots, tokens, back_pointers, most, max_nodes: see `ranked_nodes`.
        scores: [R, L, W] float32, none above its parent's; -inf for what may not be in the tree.

    Returns:
        tokens, parents, depths [R, K+1] int32 and num_nodes [R] int32 of the trees, and order
        [R, K] int64: each node's index among the explored [L * W].
    """
    requests, length, width = tokens.shape
    tree_tokens = np.full((requests, max_nodes + 1), -1, dtype=np.int32)
    parents = np.zeros((requests, max_nodes + 1), dtype=np.int32)
    depths = np.zeros((requests, max_nodes + 1), dtype=np.int32)
    num_nodes = np.ones(requests, dtype=np.int32)
    order = np.zeros((requests, max_nodes), dtype=np.int64)
    node_of = np.zeros((length, width), dtype=np.int32)
    for r in range(requests):
        tree_tokens[r, 0] = roots[r]
        # Stable: of equally probable nodes the parent comes first.
        best_first = np.argsort(-scores[r].copy().reshape(-1), kind="mergesort")
        for at in range(min(most[r], length * width)):
            level, beam = best_first[at] // width, best_first[at] % width
            if scores[r, level, beam] == -np.inf:
                break
            node = at + 1
            node_of[level, beam] = node
            order[r, at] = best_first[at]
            tree_tokens[r, node] = tokens[r, level, beam]
            if level:
                parents[r, node] = node_of[level - 1, back_pointers[r, level, beam]]
            depths[r, node] = level + 1
            num_nodes[r] = node + 1
    return tree_tokens, parents, depths, num_nodes, order


def cut(tree: TokenTree, most: Array) -> None:
    """Cut trees to their roots and first `most` [R] nodes: `TokenTree.prefix`, in place."""
    num_nodes = tree.num_nodes.numpy()
    _cut(tree.tokens.numpy(), tree.parents.numpy(), tree.depths.numpy(), num_nodes, most)


@compiled
def _cut(tokens: Array, parents: Array, depths: Array, num_nodes: Array, most: Array) -> None:
    for r in range(len(num_nodes)):
        kept = min(num_nodes[r], most[r] + 1)
        for node in range(kept, num_nodes[r]):
            tokens[r, node], parents[r, node], depths[r, node] = -1, 0, 0
        num_nodes[r] = kept
