# SPDX-License-Identifier: Apache-2.0
"""The batch's budget, shared among its requests: what `drafting/ranking.py` compiles."""

import numpy as np
import numpy.typing as npt

from vllm_redrafter.budget.choice import Choice, Flags, Floats, VerifyCosts, best_budget


def best_trim(
    survival: Floats, sampled: Flags, verify_costs: VerifyCosts
) -> tuple[npt.NDArray[np.int64], Choice]:
    """How many of its first nodes each request verifies, and what is expected of it.

    Args:
        survival: [R, K], descending along each request; 0 where there is no node.
        sampled: [R] bool.
        verify_costs: see there.
    """
    requests = survival.shape[0]
    ratios = np.where(sampled, verify_costs.sampled_ratio, verify_costs.greedy_ratio)
    probable = survival.astype(np.float64) * ratios[:, None]
    verify = verify_costs.verify_seconds[: requests + survival.size + 1].copy()
    verify[requests] = verify_costs.nothing_seconds
    choice = best_budget(probable, requests, verify_costs.draft_seconds, verify)
    least = min(verify_costs.least, int(np.count_nonzero(probable > 0)))
    if choice.budget < least:
        tokens = requests + float(np.sort(probable, axis=None)[-least:].sum())
        seconds = verify_costs.draft_seconds + float(verify[requests + least])
        choice = Choice(least, tokens, seconds)
    # Stable: of equal nodes of one request, the first comes first.
    best = np.argsort(-probable, axis=None, kind="stable")[: choice.budget]
    return np.bincount(best // survival.shape[1], minlength=requests), choice
