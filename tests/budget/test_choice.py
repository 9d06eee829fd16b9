# SPDX-License-Identifier: Apache-2.0
"""The rule: the budget with the highest expected throughput."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vllm_redrafter.budget.choice import Floats, best_budget, best_common_budget

PROBABILITIES = arrays.arrays(
    np.float64, st.tuples(st.integers(1, 3), st.integers(1, 4)), elements=st.floats(0.0, 1.0)
)
COSTS = arrays.arrays(np.float64, 20, elements=st.floats(0.1, 10.0))


@settings(deadline=None)
@given(PROBABILITIES, COSTS, st.floats(0.0, 5.0))
def test_the_choice_is_the_best_of_all_ways_to_cut_the_trees(
    survival: Floats, costs: Floats, draft: float
) -> None:
    # As trees have it: along each request, no node is more probable than one before it.
    survival, verify = np.minimum.accumulate(survival, axis=1), np.maximum.accumulate(costs)
    requests, nodes = survival.shape
    choice = best_budget(survival, requests, draft, verify)
    rates = [
        (requests + sum(survival[r, :cut].sum() for r, cut in enumerate(cuts)))
        / (draft + verify[requests + sum(cuts)])
        for cuts in itertools.product(range(nodes + 1), repeat=requests)
    ]
    assert choice.tokens_per_second == pytest.approx(max(rates))


@settings(deadline=None)
@given(PROBABILITIES, COSTS, st.floats(0.0, 5.0), st.integers(1, 3), st.integers(1, 5))
def test_a_common_budget_is_the_best_that_requests_which_are_alike_can_all_have(
    survival: Floats, costs: Floats, draft: float, requests: int, most: int
) -> None:
    verify = np.maximum.accumulate(costs)
    choice = best_common_budget(survival, most, requests, draft, verify)
    best = np.sort(survival, axis=None)[::-1]
    rates = [
        requests * (1.0 + best[:nodes].sum()) / (draft + verify[requests * (1 + nodes)])
        for nodes in range(1, min(most, survival.size) + 1)
    ]
    assert choice.tokens_per_second == pytest.approx(max(rates))
    assert choice.budget % requests == 0 < choice.budget
