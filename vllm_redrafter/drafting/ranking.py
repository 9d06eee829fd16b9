# SPDX-License-Identifier: Apache-2.0
"""The trees of a search: nodes ranked by how probable they are to be accepted, as many as pay.

The mathematics is that of `budget/acceptance.py` and `tree/token_tree.py`, which say it in torch,
and of `budget/choice.py`. numba compiles the loops. Tests hold them equal.
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
    match_lengths: Array,
    sampled: Array,
    slopes: Array,
    biases: Array,
    match_probabilities: Array,
    request_nodes: Array,
    max_nodes: int,
    greedy_ratio: float,
    sampled_ratio: float,
    draft_seconds: float,
    verify_seconds: Array,
    nothing_seconds: float,
    least: int,
    chains: Array,
) -> tuple[Array, Array, Array, Array, Array, Array, Array, Array, Array, float]:
    """Select each request's most probable nodes, as many as the batch's best budget has.

    Args:
        roots: [R] int64, the last sampled tokens.
        tokens, back_pointers: [R, L, W] int64, of the nodes that may be in the trees.
        log_probs: [R, L, W] float32, of the search, cumulative; -inf where it has no node.
        match_lengths: [R, L, W] int64, of the path that a node is on; 0 for none.
        sampled: [R] bool, requests that sample.
        slopes, biases: [2] and [2, L or more] float32, of the acceptance models of requests that do
            not sample, and of those that do.
        match_probabilities: [2, lengths, L or more] float32, of nodes on paths given their parents,
            likewise.
        request_nodes: [R] int64, the most nodes of each request, roots not counted; at most K.
        max_nodes: K.
        greedy_ratio, sampled_ratio, draft_seconds, verify_seconds, nothing_seconds, least: see
            `budget.choice.VerifyCosts`.
        chains: [R] bool, requests of which a single path is verified.

    Returns:
        tokens, parents, depths: [R, K+1] int32, of the trees (see `TokenTree`).
        num_nodes: [R] int32, roots counted.
        log_odds: [R, K+1] float32, the draft's log-odds of each node given its parent; 0 for the
            root, -inf for what is on a path alone.
        node_match_lengths: [R, K+1] int64, `match_lengths` of the nodes.
        survival: [R, K+1] float32; 1 for the root, 0 in unused slots.
        probable: [R, K] float64, how probable nodes are to be accepted, those too that are not
            worth verifying.
        explored: [R, L, W] float32, the survival probabilities of the search's nodes without paths.
        expected: the tokens of those requests that verify something.
    """
    no_match = np.zeros_like(match_lengths)
    calibration = (slopes, biases, match_probabilities)
    log_odds, of_search = scored(back_pointers, log_probs, no_match, sampled, *calibration)
    log_survival = of_search
    if match_lengths.any():
        _, log_survival = scored(back_pointers, log_probs, match_lengths, sampled, *calibration)
    if chains.any():
        log_survival = on_best_path(back_pointers, log_survival, chains)
    trees = _selected_nodes(roots, tokens, back_pointers, log_survival, request_nodes, max_nodes)
    tree_tokens, parents, depths, num_nodes, order = trees
    node_log_odds = np.zeros(tree_tokens.shape, dtype=np.float32)
    node_match_lengths = np.zeros(tree_tokens.shape, dtype=np.int64)
    survival = np.zeros(tree_tokens.shape, dtype=np.float32)
    probable = np.zeros(order.shape)
    width = tokens.shape[2]
    for r in range(len(roots)):
        survival[r, 0] = 1.0
        for node in range(1, num_nodes[r]):
            level, beam = order[r, node - 1] // width, order[r, node - 1] % width
            node_log_odds[r, node] = log_odds[r, level, beam]
            node_match_lengths[r, node] = match_lengths[r, level, beam]
            survival[r, node] = math.exp(log_survival[r, level, beam])
            probable[r, node - 1] = survival[r, node] * (
                sampled_ratio if sampled[r] else greedy_ratio
            )
    costs = (draft_seconds, verify_seconds, nothing_seconds)
    kept, expected = _worth_verifying(probable, costs, least)
    for r in range(len(roots)):
        for node in range(kept[r] + 1, num_nodes[r]):
            tree_tokens[r, node], parents[r, node], depths[r, node] = -1, 0, 0
            node_log_odds[r, node], node_match_lengths[r, node], survival[r, node] = 0.0, 0, 0.0
        num_nodes[r] = kept[r] + 1
    return (
        tree_tokens,
        parents,
        depths,
        num_nodes,
        node_log_odds,
        node_match_lengths,
        survival,
        probable,
        np.exp(of_search),
        expected,
    )


@compiled
def on_best_path(back_pointers: Array, log_survival: Array, chains: Array) -> Array:
    """Leave the nodes of the path of which the most tokens are expected; -inf for all others.

    Args:
        back_pointers: [R, L, W] int64.
        log_survival: [R, L, W] float32; -inf where there is no node.
        chains: [R] bool, of which requests; the others are left as they are.
    """
    requests, length, width = log_survival.shape
    kept = np.full(log_survival.shape, -np.inf, dtype=np.float32)
    for r in range(requests):
        if not chains[r]:
            kept[r] = log_survival[r]
            continue
        # The tokens of the best path below each node, its own included; and where that goes on.
        worth, below = np.zeros((length + 1, width)), np.full((length + 1, width), -1)
        for level in range(length - 1, -1, -1):
            for beam in range(width):
                if log_survival[r, level, beam] > -np.inf:
                    worth[level + 1, beam] += math.exp(log_survival[r, level, beam])
                    above = back_pointers[r, level, beam] if level else 0
                    if worth[level + 1, beam] > worth[level, above]:
                        worth[level, above], below[level, above] = worth[level + 1, beam], beam
        beam = below[0, 0]
        for level in range(length):
            if beam < 0:
                break
            kept[r, level, beam] = log_survival[r, level, beam]
            beam = below[level + 1, beam]
    return kept


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
def scored(
    back_pointers: Array,
    log_probs: Array,
    match_lengths: Array,
    sampled: Array,
    slopes: Array,
    biases: Array,
    match_probabilities: Array,
) -> tuple[Array, Array]:
    """The draft's log-odds given the parent, and the logs of survival.

    A node that is on a path, too, is as probable as the more confident of both sources says.

    Args:
        back_pointers, log_probs, match_lengths, sampled, slopes, biases, match_probabilities: see
            `best_trees`.

    Returns:
        [R, L, W] float32 each; -inf where the search has no node, or nobody has one.
    """
    log_odds = np.full(log_probs.shape, -np.inf, dtype=np.float32)
    log_survival = np.full(log_probs.shape, -np.inf, dtype=np.float32)
    requests, length, width = log_probs.shape
    for r in range(requests):
        kind = 1 if sampled[r] else 0
        for level in range(length):
            for beam in range(width):
                parent = back_pointers[r, level, beam] if level else 0
                accepted = -np.inf
                if log_probs[r, level, beam] > -np.inf:
                    above = log_probs[r, level - 1, parent] if level else 0.0
                    f = _log_odds(log_probs[r, level, beam] - above)
                    log_odds[r, level, beam] = f
                    # The log of the sigmoid; its argument is bounded as the log-odds are.
                    accepted = -math.log1p(math.exp(-(slopes[kind] * f + biases[kind, level])))
                matched = match_lengths[r, level, beam]
                if matched:
                    accepted = max(
                        accepted, math.log(match_probabilities[kind, matched - 1, level])
                    )
                log_survival_above = log_survival[r, level - 1, parent] if level else 0.0
                log_survival[r, level, beam] = log_survival_above + accepted
    return log_odds, log_survival


@compiled
def _log_odds(log_prob: float) -> float:
    """Of a probability's logarithm; within +-MAX_LOG_ODDS."""
    denominator = -math.expm1(min(log_prob, 0.0))
    if denominator <= 0.0:
        return MAX_LOG_ODDS
    return max(-MAX_LOG_ODDS, min(min(log_prob, 0.0) - math.log(denominator), MAX_LOG_ODDS))


@compiled
def _selected_nodes(
    roots: Array,
    tokens: Array,
    back_pointers: Array,
    scores: Array,
    request_nodes: Array,
    max_nodes: int,
) -> tuple[Array, Array, Array, Array, Array]:
    """See `token_tree.select_nodes`.

    Args:
        roots, tokens, back_pointers, request_nodes, max_nodes: see `best_trees`.
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
        for at in range(min(request_nodes[r], length * width)):
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
