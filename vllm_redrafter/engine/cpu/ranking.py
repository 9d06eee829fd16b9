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

Array = npt.NDArray[Any]


@compiled
def ranked_nodes(
    roots: Array,
    tokens: Array,
    back_pointers: Array,
    log_probs: Array,
    allowed: Array,
    slope: float,
    biases: Array,
    max_nodes: int,
) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
    """Select each request's most probable nodes.

    Args:
        roots: [R] int64, the last sampled tokens.
        tokens, back_pointers: [R, L, W] int64, of the search.
        log_probs: [R, L, W] float32, cumulative; -inf where there is no node.
        allowed: [R, L, W] bool: nodes that may be in the tree; a node's parent is, if it is.
        slope, biases: of the acceptance model, [L] float32.
        max_nodes: K.

    Returns:
        tokens, parents, depths: [R, K+1] int32, of the trees (see `TokenTree`).
        num_nodes: [R] int32, roots counted.
        odds: [R, K+1] float32, the draft's log-odds of each node given its parent; 0 for the root.
        survival: [R, K+1] float32; 1 for the root, 0 in unused slots.
        explored: [R, L, W] float32, the survival probabilities of all that was visited.
    """
    requests, length, width = tokens.shape
    tree_tokens = np.full((requests, max_nodes + 1), -1, dtype=np.int32)
    parents = np.zeros((requests, max_nodes + 1), dtype=np.int32)
    depths = np.zeros((requests, max_nodes + 1), dtype=np.int32)
    num_nodes = np.ones(requests, dtype=np.int32)
    node_odds = np.zeros((requests, max_nodes + 1), dtype=np.float32)
    survival = np.zeros((requests, max_nodes + 1), dtype=np.float32)
    explored = np.zeros((requests, length, width), dtype=np.float32)
    odds = np.zeros((length, width), dtype=np.float32)
    log_survival = np.zeros((length, width), dtype=np.float32)
    candidates = np.zeros(length * width, dtype=np.float32)
    node_of = np.zeros((length, width), dtype=np.int32)
    for r in range(requests):
        for level in range(length):
            for beam in range(width):
                log_prob = log_probs[r, level, beam]
                candidates[level * width + beam] = -np.inf
                if log_prob == -np.inf:
                    odds[level, beam] = -MAX_LOG_ODDS
                    log_survival[level, beam] = -np.inf
                    continue
                above, log_survival_above = 0.0, 0.0
                if level:
                    parent = back_pointers[r, level, beam]
                    above = log_probs[r, level - 1, parent]
                    log_survival_above = log_survival[level - 1, parent]
                given_parent = min(log_prob - above, 0.0)
                denominator = -math.expm1(given_parent)
                f = MAX_LOG_ODDS
                if denominator > 0.0:
                    f = given_parent - math.log(denominator)
                f = max(-MAX_LOG_ODDS, min(f, MAX_LOG_ODDS))
                odds[level, beam] = f
                # The log of the sigmoid; its argument is bounded as the log-odds are.
                accepted = -math.log1p(math.exp(-(slope * f + biases[level])))
                log_survival[level, beam] = log_survival_above + accepted
                explored[r, level, beam] = math.exp(log_survival[level, beam])
                if allowed[r, level, beam]:
                    candidates[level * width + beam] = log_survival[level, beam]
        tree_tokens[r, 0] = roots[r]
        survival[r, 0] = 1.0
        # Stable: of equally probable nodes the parent comes first.
        order = np.argsort(-candidates, kind="mergesort")
        for at in range(min(max_nodes, length * width)):
            level, beam = order[at] // width, order[at] % width
            if candidates[order[at]] == -np.inf:
                break
            node = at + 1
            node_of[level, beam] = node
            tree_tokens[r, node] = tokens[r, level, beam]
            if level:
                parents[r, node] = node_of[level - 1, back_pointers[r, level, beam]]
            depths[r, node] = level + 1
            node_odds[r, node] = odds[level, beam]
            survival[r, node] = explored[r, level, beam]
            num_nodes[r] = node + 1
    return tree_tokens, parents, depths, num_nodes, node_odds, survival, explored
