"""The trees of a search: nodes ranked by how probable they are to be accepted, as many as pay.

The mathematics is that of `budget/acceptance.py` and `token_tree.py`, which say it in torch for
any device, and of `budget/choice.py`. A step of a small target takes a few milliseconds, of which
some hundred calls of torch on a few dozen numbers are a large part; numba compiles the loops. Tests
hold them equal.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_redrafter.budget.acceptance import MAX_LOG_ODDS
from vllm_redrafter.utils.compiled import compiled

Array = npt.NDArray[Any]


@compiled
def best_trees(
    roots: Array,
    tokens: Array,
    back_pointers: Array,
    log_probs: Array,
    candidates: Array,
    sampled: Array,
    slopes: Array,
    biases: Array,
    most: Array,
    max_nodes: int,
    greedy_ratio: float,
    sampled_ratio: float,
    draft_seconds: float,
    verify_seconds: Array,
    nothing_seconds: float,
    least: int,
) -> tuple[Array, Array, Array, Array, Array, Array, Array, float]:
    """Select each request's most probable nodes, as many as the batch's best budget has.

    Args:
        roots: [R] int64, the last sampled tokens.
        tokens, back_pointers: [R, L, W] int64, of the search.
        log_probs: [R, L, W] float32, cumulative; -inf where there is no node.
        candidates: [R, L, W] float32, see `policy.candidate_log_probs`: -inf for nodes that may not
            be in the tree.
        sampled: [R] bool, requests that sample.
        slopes, biases: [2] and [2, L or more] float32, of the acceptance models of requests that do
            not sample, and of those that do.
        most: [R] int64, the most nodes of each request, roots not counted; at most K.
        max_nodes: K.
        greedy_ratio, sampled_ratio, draft_seconds, verify_seconds, nothing_seconds, least: see
            `budget.choice.Terms`.

    Returns:
        tokens, parents, depths: [R, K+1] int32, of the trees (see `TokenTree`).
        num_nodes: [R] int32, roots counted.
        log_odds: [R, K+1] float32, the draft's log-odds of each node given its parent; 0 for the
            root.
        survival: [R, K+1] float32; 1 for the root, 0 in unused slots.
        explored: [R, L, W] float32, the survival probabilities of all that was visited.
        expected: the tokens of those requests that verify something.
    """
    log_odds, log_survival = _scored(back_pointers, log_probs, sampled, slopes, biases)
    scores = np.where(candidates == -np.inf, candidates, log_survival)
    trees = selected_nodes(roots, tokens, back_pointers, scores, most, max_nodes)
    tree_tokens, parents, depths, num_nodes, order = trees
    node_log_odds = np.zeros(tree_tokens.shape, dtype=np.float32)
    survival = np.zeros(tree_tokens.shape, dtype=np.float32)
    probable = np.zeros(order.shape)
    width = tokens.shape[2]
    for r in range(len(roots)):
        survival[r, 0] = 1.0
        for node in range(1, num_nodes[r]):
            level, beam = order[r, node - 1] // width, order[r, node - 1] % width
            node_log_odds[r, node] = log_odds[r, level, beam]
            survival[r, node] = math.exp(log_survival[r, level, beam])
            probable[r, node - 1] = survival[r, node] * (
                sampled_ratio if sampled[r] else greedy_ratio
            )
    costs = (draft_seconds, verify_seconds, nothing_seconds)
    kept, expected = _worth_verifying(probable, costs, least)
    for r in range(len(roots)):
        for node in range(kept[r] + 1, num_nodes[r]):
            tree_tokens[r, node], parents[r, node], depths[r, node] = -1, 0, 0
            node_log_odds[r, node], survival[r, node] = 0.0, 0.0
        num_nodes[r] = kept[r] + 1
    explored = np.exp(log_survival)
    return tree_tokens, parents, depths, num_nodes, node_log_odds, survival, explored, expected


@compiled
def _worth_verifying(
    probable: Array, costs: tuple[float, Array, float], least: int
) -> tuple[Array, float]:
    """How long each request's prefix is, by the rule of `budget.choice`.

    Args:
        probable: [R, K] float64, descending along each request; 0 where there is no node.
        costs: D, V by rows, and V where nothing is verified.
        least: the smallest budget, as far as there are nodes.

    Returns:
        The first nodes of each request to verify [R] int64; and the tokens that are expected of
        those requests that have some.
    """
    requests, width = probable.shape
    draft_seconds, verify_seconds, nothing_seconds = costs
    # Stable: of equal nodes of one request, the first comes first.
    best_first = np.argsort(-probable.ravel(), kind="mergesort")
    tokens = float(requests)
    budget, best_tokens, best_seconds = 0, tokens, draft_seconds + nothing_seconds
    nodes = 0
    for node in best_first:
        worth = probable[node // width, node % width]
        if worth <= 0.0:
            break
        nodes += 1
        tokens += worth
        seconds = draft_seconds + verify_seconds[requests + nodes]
        if tokens * best_seconds > best_tokens * seconds:
            budget, best_tokens, best_seconds = nodes, tokens, seconds
    kept = np.zeros(requests, dtype=np.int64)
    expected = 0.0
    for node in best_first[: max(budget, min(least, nodes))]:
        kept[node // width] += 1
        expected += probable[node // width, node % width]
    return kept, expected + float(np.count_nonzero(kept))


@compiled
def _scored(
    back_pointers: Array, log_probs: Array, sampled: Array, slopes: Array, biases: Array
) -> tuple[Array, Array]:
    """[R, L, W] float32 each: the draft's log-odds given the parent, the logs of survival."""
    log_odds = np.full(log_probs.shape, -MAX_LOG_ODDS, dtype=np.float32)
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
                log_odds[r, level, beam] = f
                # The log of the sigmoid; its argument is bounded as the log-odds are.
                accepted = -math.log1p(math.exp(-(slopes[kind] * f + biases[kind, level])))
                log_survival[r, level, beam] = log_survival_above + accepted
    return log_odds, log_survival


@compiled
def selected_nodes(
    roots: Array, tokens: Array, back_pointers: Array, scores: Array, most: Array, max_nodes: int
) -> tuple[Array, Array, Array, Array, Array]:
    """See `token_tree.select_nodes`.

    Args:
        roots, tokens, back_pointers, most, max_nodes: see `best_trees`.
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
