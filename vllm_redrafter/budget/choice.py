# SPDX-License-Identifier: Apache-2.0
"""The rule: how many of a batch's nodes to verify, by what they cost and are likely to bring.

Every prefix of a node list is a tree, so to share a budget over a batch is to choose how long each
prefix is. With S(B) the sum of the B largest survival probabilities in a batch of N requests,
N + S(B) is the expected number of tokens of a step that verifies B nodes; with D and V the costs
of drafting and of a step of so many rows,

    B* = argmax_B (N + S(B)) / (D + V(N + B)).

The rule is vLLM's own for chains (`v1/worker/gpu/spec_decode/adaptive_verification.py`).
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Flags = npt.NDArray[np.bool_]


class Choice(NamedTuple):
    """A budget of B nodes, the tokens expected of the step, and those per second."""

    budget: int
    tokens: float
    tokens_per_second: float


class VerifyCosts(NamedTuple):
    """What verifying the nodes costs, and what their survival is worth.

    Attributes:
        ratios: [2], what survival of greedy and of sampled requests is multiplied by.
        draft_seconds: D.
        tree_seconds: [rows] float64: V of 0, 1, 2... rows, as many as there may be.
        chain_seconds: the same of steps in which no request's nodes branch.
        least: the smallest budget, as far as there are nodes.
    """

    ratios: Floats
    draft_seconds: float
    tree_seconds: Floats
    chain_seconds: Floats
    least: int


def verify_everything(rows: int) -> VerifyCosts:
    """VerifyCosts by which all nodes are verified, of up to so many rows."""
    alike = np.ones(rows + 1)
    return VerifyCosts(np.ones(2), 0.0, alike, alike, rows)


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
    ranked = np.sort(survival, axis=None)[::-1]
    ranked = ranked[ranked > 0]
    tokens = requests + np.concatenate(([0.0], np.cumsum(ranked)))
    seconds = draft_seconds + verify_seconds[requests : requests + tokens.shape[0]]
    rates = tokens / seconds
    best = int(rates.argmax())
    return Choice(best, float(tokens[best]), float(rates[best]))


def best_common_budget(
    survival: Floats, max_nodes: int, requests: int, draft_seconds: float, verify_seconds: Floats
) -> Choice:
    """The best budget of requests that are all alike, and verify at least one node each.

    Args:
        survival: [L, W], of the nodes of any of them.
        max_nodes: that a request may verify; at least 1.
        requests, draft_seconds, verify_seconds: see `best_budget`.
    """
    ranked = np.sort(survival, axis=None)[::-1][:max_nodes]
    tokens = requests * (1.0 + np.cumsum(ranked))
    nodes = np.arange(1, ranked.shape[0] + 1)
    seconds = draft_seconds + verify_seconds[requests * (1 + nodes)]
    rates = tokens / seconds
    best = int(rates.argmax())
    return Choice(requests * (best + 1), float(tokens[best]), float(rates[best]))
