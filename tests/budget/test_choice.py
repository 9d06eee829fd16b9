"""The rule: the budget with the highest expected throughput, shared over the batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vllm_redrafter.budget.choice import (
    Floats,
    Terms,
    best_budget,
    best_common_share,
    best_shares,
    shares,
    unlimited,
)

PROBABILITIES = arrays.arrays(
    np.float64, st.tuples(st.integers(1, 3), st.integers(1, 4)), elements=st.floats(0.0, 1.0)
)


def descending(survival: Floats) -> Floats:
    """As trees have it: along each request, no node is more probable than one before it."""
    return np.minimum.accumulate(survival, axis=1)


COSTS = arrays.arrays(np.float64, 20, elements=st.floats(0.1, 10.0))


@settings(deadline=None)
@given(PROBABILITIES, COSTS, st.floats(0.0, 5.0))
def test_the_choice_is_the_best_of_all_ways_to_cut_the_trees(
    survival: Floats, costs: Floats, draft: float
) -> None:
    survival, verify = descending(survival), np.maximum.accumulate(costs)
    requests, nodes = survival.shape
    choice = best_budget(survival, requests, draft, verify)
    rates = [
        (requests + sum(survival[r, :cut].sum() for r, cut in enumerate(cuts)))
        / (draft + verify[requests + sum(cuts)])
        for cuts in itertools.product(range(nodes + 1), repeat=requests)
    ]
    assert choice.tokens_per_second == pytest.approx(max(rates))


@settings(deadline=None)
@given(PROBABILITIES, st.integers(0, 15))
def test_shares_are_prefixes_that_hold_the_best_nodes(survival: Floats, budget: int) -> None:
    survival = descending(survival)
    cuts = shares(survival, budget)
    assert cuts.sum() == min(budget, (survival > 0).sum())
    admitted = [survival[r, :cut] for r, cut in enumerate(cuts)]
    best = np.sort(survival[survival > 0])[::-1][:budget]
    assert sum(a.sum() for a in admitted) == pytest.approx(best.sum())


@settings(deadline=None)
@given(PROBABILITIES)
def test_more_budget_never_takes_a_node_away(survival: Floats) -> None:
    survival = descending(survival)
    cuts = [shares(survival, budget) for budget in range(survival.size + 1)]
    assert all((more >= less).all() for less, more in itertools.pairwise(cuts))


def test_nothing_is_verified_where_every_row_costs_as_much_as_the_first() -> None:
    choice = best_budget(np.full((4, 3), 0.5), 4, 0.0, np.arange(1.0, 40.0))
    assert choice == (0, 4.0, 5.0)


def test_everything_is_verified_where_rows_are_free() -> None:
    assert best_budget(np.full((4, 3), 0.1), 4, 1.0, np.ones(40)).budget == 12


def test_a_dearer_draft_asks_for_more_nodes() -> None:
    survival, verify = np.linspace(0.9, 0.05, 12)[None], np.linspace(1.0, 3.0, 20)
    budgets = [best_budget(survival, 1, draft, verify).budget for draft in (0.0, 1.0, 5.0)]
    assert budgets == sorted(budgets)
    assert budgets[0] < budgets[-1]


@settings(deadline=None)
@given(
    PROBABILITIES,
    COSTS,
    st.floats(0.0, 5.0),
    st.floats(0.1, 10.0),
    st.integers(0, 15),
    st.floats(0.2, 1.0),
    st.integers(0, 7),
)
def test_shares_on_given_terms_are_those_of_the_best_budget_on_them(
    survival: Floats,
    costs: Floats,
    draft: float,
    nothing: float,
    least: int,
    truth: float,
    kinds: int,
) -> None:
    survival, verify = descending(survival), np.maximum.accumulate(costs)
    requests = survival.shape[0]
    others = np.array([bool(kinds & 1 << r) for r in range(requests)])
    terms = Terms(1.0, truth, draft, verify, nothing, least)
    cuts, choice = best_shares(survival, others, terms)
    probable, seconds = survival * np.where(others, truth, 1.0)[:, None], verify.copy()
    seconds[requests] = nothing
    alone = best_budget(probable, requests, draft, seconds)
    assert choice.budget == max(alone.budget, min(least, (probable > 0).sum()))
    assert cuts.tolist() == shares(probable, choice.budget).tolist()
    best = np.sort(probable, axis=None)[::-1][: choice.budget]
    assert choice.tokens == pytest.approx(requests + best.sum())
    assert choice.seconds == draft + seconds[requests + choice.budget]


def test_there_are_terms_on_which_everything_is_verified() -> None:
    survival = np.array([[0.5, 1e-6], [0.2, 0.0]])
    cuts, choice = best_shares(survival, np.zeros(2, dtype=np.bool_), unlimited(6))
    assert cuts.tolist() == [2, 1]
    assert choice.tokens == pytest.approx(2.700001)


@settings(deadline=None)
@given(PROBABILITIES, COSTS, st.floats(0.0, 5.0), st.integers(1, 3), st.integers(1, 5))
def test_a_common_share_is_the_best_that_requests_which_are_alike_can_all_have(
    survival: Floats, costs: Floats, draft: float, requests: int, most: int
) -> None:
    verify = np.maximum.accumulate(costs)
    choice = best_common_share(survival, most, requests, draft, verify)
    best = np.sort(survival, axis=None)[::-1]
    rates = [
        requests * (1.0 + best[:nodes].sum()) / (draft + verify[requests * (1 + nodes)])
        for nodes in range(1, min(most, survival.size) + 1)
    ]
    assert choice.tokens_per_second == pytest.approx(max(rates))
    assert choice.budget % requests == 0 < choice.budget
