# SPDX-License-Identifier: Apache-2.0
"""The trees of a search: nodes ranked by how probable they are to be accepted, as many as pay.

These are the compiled forms of `budget/acceptance.py`, `tree/token_tree.py` and `budget/choice.py`.
"""

import math

import numpy as np

from vllm_redrafter.budget.acceptance import MAX_LOG_ODDS
from vllm_redrafter.budget.choice import VerifyCosts
from vllm_redrafter.drafting.joining import DraftNodes
from vllm_redrafter.utils.compiled import Array, compiled


@compiled
def best_trees(
    roots: Array,
    nodes: DraftNodes,
    sampled: Array,
    calibration: tuple[Array, Array, Array],
    request_nodes: Array,
    max_nodes: int,
    costs: VerifyCosts,
    chains: Array,
) -> tuple[Array, Array, Array, Array, Array, Array, Array, Array, float, float]:
    """Select each request's most probable nodes, as many as the batch's best budget has.

    Args:
        roots: [R] int64, the last sampled tokens.
        nodes: what may be in the trees.
        sampled: [R] bool, requests that sample.
        calibration: slopes [2] and biases [2, L or more] float32, of the acceptance models of
            greedy and of sampled requests; and `MatchAcceptance.probabilities`.
        request_nodes: [R] int64, the most nodes of each request, roots not counted; at most K.
        max_nodes: K.
        costs: by which to choose how many nodes are verified, and whether they branch anywhere.
        chains: [R] bool, requests of which a single path is verified.

    Returns:
        tokens, parents, depths: [R, K+1] int32, of the trees (see `TokenTree`).
        num_nodes: [R] int32, roots counted.
        log_odds, match_classes, survival, expected: see `Draft`.
        explored: [R, L, W] float32, the survival probabilities of the search's nodes alone.
        tokens_per_second: see `Draft`.
    """
    tokens, back_pointers, log_probs, match_classes = nodes
    no_match = np.zeros_like(match_classes)
    log_odds, of_search = _scored(back_pointers, log_probs, no_match, sampled, *calibration)
    log_survival = of_search
    if match_classes.any():
        _, log_survival = _scored(back_pointers, log_probs, match_classes, sampled, *calibration)
    limits = sampled, request_nodes, max_nodes
    paths = _on_best_path(back_pointers, log_survival, np.ones_like(chains))
    best = _selected(roots, nodes, paths, limits, costs, costs.chain_seconds)
    if not chains.all():
        if chains.any():
            log_survival = _on_best_path(back_pointers, log_survival, chains)
        trees = _selected(roots, nodes, log_survival, limits, costs, costs.tree_seconds)
        # Explorations tell what trees cost now.
        if trees[-1] >= best[-1] or costs.least:
            best = trees
    (tree_tokens, parents, depths, num_nodes, order), node_survival, expected, rate = best
    node_log_odds: Array = np.zeros(tree_tokens.shape, dtype=np.float32)
    node_match_classes: Array = np.zeros(tree_tokens.shape, dtype=np.int64)
    width = tokens.shape[2]
    for r in range(len(roots)):
        for node in range(1, num_nodes[r]):
            level, beam = order[r, node - 1] // width, order[r, node - 1] % width
            node_log_odds[r, node] = log_odds[r, level, beam]
            node_match_classes[r, node] = match_classes[r, level, beam]
    return (
        tree_tokens,
        parents,
        depths,
        num_nodes,
        node_log_odds,
        node_match_classes,
        node_survival,
        np.exp(of_search),
        expected,
        rate,
    )


@compiled
def _selected(
    roots: Array,
    nodes: DraftNodes,
    log_survival: Array,
    limits: tuple[Array, Array, int],
    costs: VerifyCosts,
    verify_seconds: Array,
) -> tuple[tuple[Array, Array, Array, Array, Array], Array, float, float]:
    """The most probable nodes of each request that are worth verifying at this cost.

    Returns what `_selected_nodes` does of them, their survival [R, K+1], and what
    `_worth_verifying` expects of the step.
    """
    sampled, request_nodes, max_nodes = limits
    tree = _selected_nodes(roots, nodes[0], nodes[1], log_survival, request_nodes, max_nodes)
    tokens, parents, depths, num_nodes, order = tree
    survival = np.zeros(tokens.shape, dtype=np.float32)
    probable = np.zeros(order.shape)
    survival[:, 0] = 1.0
    for r in range(len(roots)):
        of_request = log_survival[r].copy().reshape(-1)
        for node in range(1, num_nodes[r]):
            survival[r, node] = math.exp(of_request[order[r, node - 1]])
            probable[r, node - 1] = survival[r, node] * costs.ratios[1 if sampled[r] else 0]
    kept, expected, rate = _worth_verifying(probable, costs, verify_seconds)
    for r in range(len(roots)):
        for node in range(kept[r] + 1, num_nodes[r]):
            tokens[r, node], parents[r, node], depths[r, node] = -1, 0, 0
            survival[r, node] = 0.0
        num_nodes[r] = kept[r] + 1
    return tree, survival, expected, rate


@compiled
def _on_best_path(back_pointers: Array, log_survival: Array, chains: Array) -> Array:
    """`policy.on_best_path` of the requests that are `chains`, [R] bool."""
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
    probable: Array, costs: VerifyCosts, verify_seconds: Array
) -> tuple[Array, float, float]:
    """How many of each request's nodes to verify [R] int64, the tokens expected of those requests,
    and the tokens per second of the best budget.

    By the rule of `budget.choice`; `probable`, [R, K], descends along each request.
    """
    requests, width = probable.shape
    # Stable: of equal nodes of one request, the first comes first.
    best_first = np.argsort(-probable.ravel(), kind="mergesort")
    tokens = float(requests)
    # To verify nothing takes no branches.
    best_seconds = costs.draft_seconds + costs.chain_seconds[requests]
    budget, best_tokens = 0, tokens
    nodes = 0
    for node in best_first:
        worth = probable[node // width, node % width]
        if worth <= 0.0:
            break
        nodes += 1
        tokens += worth
        seconds = costs.draft_seconds + verify_seconds[requests + nodes]
        if tokens * best_seconds > best_tokens * seconds:
            budget, best_tokens, best_seconds = nodes, tokens, seconds
    kept = np.zeros(requests, dtype=np.int64)
    expected = 0.0
    for node in best_first[: max(budget, min(costs.least, nodes))]:
        kept[node // width] += 1
        expected += probable[node // width, node % width]
    rate = float(best_tokens / best_seconds)
    return kept, expected + float(np.count_nonzero(kept)), rate


@compiled
def _scored(
    back_pointers: Array,
    log_probs: Array,
    match_classes: Array,
    sampled: Array,
    slopes: Array,
    biases: Array,
    match_probabilities: Array,
) -> tuple[Array, Array]:
    """The draft's log-odds given the parent, and the logs of survival, [R, L, W]; -inf for none.

    A node of both sources is as probable as the more confident says.
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
                matched = match_classes[r, level, beam]
                if matched:
                    accepted = max(
                        accepted, math.log(match_probabilities[kind, matched - 1, level])
                    )
                log_survival_above = log_survival[r, level - 1, parent] if level else 0.0
                log_survival[r, level, beam] = log_survival_above + accepted
    return log_odds, log_survival


@compiled
def _log_odds(log_prob: float) -> float:
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
    """`TokenTree.from_explored`: its fields, and each node's index among the scores [L * W]."""
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
