"""The rule: how many of a batch's nodes to verify, by what they cost and are likely to bring.

Every prefix of a node list is a tree, so to share a budget over a batch is to choose how long each
prefix is. With S(B) the sum of the B largest survival probabilities in a batch of N requests,
N + S(B) is the expected number of tokens of a step that verifies B nodes; with D and V the costs
of drafting and of a step of so many rows,

    B* = argmax_B (N + S(B)) / (D + V(N + B)).

The rule is vLLM's own for chains (`v1/worker/gpu/spec_decode/adaptive_verification.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_redrafter.utils.compiled import compiled

Floats = npt.NDArray[np.floating[Any]]
Flags = npt.NDArray[np.bool_]


class Choice(NamedTuple):
    """A budget and what is expected of it: B nodes, tokens and seconds of the step."""

    budget: int
    tokens: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Terms(NamedTuple):
    """What a choice is made by, besides the nodes.

    Attributes:
        truth, truth_of_others: what survival probabilities of either kind of requests are
            multiplied by.
        draft_seconds: D.
        verify_seconds: [rows] float64: V of 0, 1, 2... rows, as many as there may be.
        nothing_seconds: V where nothing is verified.
        least: the smallest budget, as far as there are nodes.
    """

    truth: float
    truth_of_others: float
    draft_seconds: float
    verify_seconds: Floats
    nothing_seconds: float
    least: int


def unlimited(rows: int) -> Terms:
    """Terms by which all nodes are verified, of up to so many rows."""
    return Terms(1.0, 1.0, 0.0, np.ones(rows + 1), 1.0, rows)


def best_budget(
    survival: Floats, requests: int, draft_seconds: float, verify_seconds: Floats
) -> Choice:
    """The budget with the highest expected throughput.

    Args:
        survival: survival probabilities of the nodes that may be verified, of any shape and in
            any order; what is not above 0 is no node.
        requests: N, which yield a token each without any draft.
        draft_seconds: D.
        verify_seconds: V of 0, 1, 2... rows, at least N + nodes + 1 of them.
    """
    ranked = np.sort(np.asarray(survival, dtype=np.float64), axis=None)
    verify = np.ascontiguousarray(verify_seconds, dtype=np.float64)
    budget, tokens = _best(ranked, requests, float(draft_seconds), verify)
    return Choice(budget, tokens, float(draft_seconds + verify_seconds[requests + budget]))


def best_shares(
    survival: Floats, kinds: Flags, terms: Terms
) -> tuple[npt.NDArray[np.int64], Choice]:
    """`best_budget` on these terms, and its `shares`; `engine/cpu/ranking.py` says both at once.

    Args:
        survival: [R, K], descending along each request; 0 where there is no node.
        kinds: [R] bool, of two kinds of requests.
        terms: see there.
    """
    requests = survival.shape[0]
    probable = survival * np.where(kinds, terms.truth_of_others, terms.truth)[:, None]
    verify = terms.verify_seconds[: requests + survival.size + 1].copy()
    verify[requests] = terms.nothing_seconds
    choice = best_budget(probable, requests, terms.draft_seconds, verify)
    least = min(terms.least, int(np.count_nonzero(probable > 0)))
    if choice.budget < least:
        tokens = requests + float(np.sort(probable, axis=None)[-least:].sum())
        choice = Choice(least, tokens, terms.draft_seconds + float(verify[requests + least]))
    return shares(probable, choice.budget), choice


def best_common_share(
    survival: Floats,
    most: int,
    requests: int,
    draft_seconds: float,
    verify_seconds: Floats,
) -> Choice:
    """The best budget of requests that are all alike, and verify as many nodes each: some.

    A draft of which nothing is verified takes little more than a plain step, and brings nothing.

    Args:
        survival: [L, W], of the nodes of any of them.
        most: nodes that a request may verify; at least 1.
        requests, draft_seconds, verify_seconds: see `best_budget`.
    """
    ranked = np.sort(survival, axis=None)
    return Choice(*_best_common_share(ranked, most, requests, draft_seconds, verify_seconds))


@compiled
def _best(
    ranked: Floats, requests: int, draft_seconds: float, verify_seconds: Floats
) -> tuple[int, float]:
    tokens = float(requests)
    best, best_tokens, best_seconds = 0, tokens, draft_seconds + verify_seconds[requests]
    for nodes in range(1, ranked.shape[0] + 1):
        # Ascending: the best is the last.
        if ranked[-nodes] <= 0:
            break
        tokens += ranked[-nodes]
        seconds = draft_seconds + verify_seconds[requests + nodes]
        if tokens * best_seconds > best_tokens * seconds:
            best, best_tokens, best_seconds = nodes, tokens, seconds
    return best, best_tokens


def shares(survival: Floats, budget: int) -> npt.NDArray[np.int64]:
    """How many of its first nodes each request verifies, so that the batch has the `budget` best.

    Args:
        survival: [R, K], descending along each request; 0 where there is no node.
        budget: B.

    Returns:
        [R] int64; their sum is B, or the number of nodes where that is smaller.
    """
    contiguous = np.ascontiguousarray(survival, dtype=np.float64)
    admitted: npt.NDArray[np.int64] = _shares(contiguous, int(budget))
    return admitted


@compiled
def _shares(survival: Floats, budget: int) -> npt.NDArray[np.int64]:
    width = survival.shape[1]
    admitted = np.zeros(survival.shape[0], dtype=np.int64)
    # Stable: of equal nodes of one request, the first comes first.
    order = np.argsort(-survival.ravel(), kind="mergesort")
    for node in order[:budget]:
        if survival[node // width, node % width] <= 0:
            break
        admitted[node // width] += 1
    return admitted


@compiled
def _best_common_share(
    ranked: Floats, most: int, requests: int, draft_seconds: float, verify_seconds: Floats
) -> tuple[int, float, float]:
    tokens = float(requests)
    best, best_tokens, best_seconds = 0, 0.0, 1.0
    for nodes in range(1, min(most, ranked.shape[0]) + 1):
        tokens += requests * ranked[-nodes]
        seconds = draft_seconds + verify_seconds[requests * (1 + nodes)]
        if tokens * best_seconds > best_tokens * seconds:
            best, best_tokens, best_seconds = nodes, tokens, seconds
    return requests * best, best_tokens, best_seconds
