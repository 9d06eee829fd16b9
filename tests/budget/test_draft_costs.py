"""How costs of drafts follow the drafts' own times."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_redrafter.budget.costs import CostTable, DraftCost, VerifyCost
from vllm_redrafter.budget.draft_costs import DraftCosts
from vllm_redrafter.budget.drift import MEMORY
from vllm_redrafter.tree.policy import SearchShape

CHAIN, NARROW, WIDE = SearchShape(1, 5), SearchShape(2, 5), SearchShape(4, 5)
TAKES = {CHAIN: 1.0, NARROW: 1.2, WIDE: 1.5}


def costs() -> DraftCosts:
    table = CostTable(
        target="t",
        drafter="d",
        device="paper",
        draft=tuple(DraftCost(n, *shape, n * TAKES[shape]) for shape in TAKES for n in (1, 16)),
        verify=(VerifyCost(1, 1.0),),
    )
    return DraftCosts(table, TAKES, max_requests=16)


def observe(made: DraftCosts, times: int, factor: float, requests: int = 4) -> None:
    for _ in range(times):
        made.observe(WIDE, requests, factor * requests * TAKES[WIDE])


def test_costs_are_as_measured_until_a_draft_says_otherwise() -> None:
    made = costs()
    for shape, seconds in TAKES.items():
        assert made.seconds(shape, 3) == pytest.approx(3 * seconds)


def test_what_one_search_takes_beyond_the_table_all_do() -> None:
    """Else those that were not tried would look cheap, and be tried for their looks."""
    made = costs()
    observe(made, 2 * MEMORY, 1.4)
    for shape, seconds in TAKES.items():
        assert made.seconds(shape, 4) == pytest.approx(1.4 * 4 * seconds)


def test_searches_keep_their_order_whatever_moment_they_were_tried_in() -> None:
    made = costs()
    for factor in np.random.default_rng(0).uniform(1.0, 3.0, size=200):
        made.observe(NARROW if factor > 2.0 else CHAIN, 4, factor * 4 * TAKES[NARROW])
        assert made.seconds(CHAIN, 4) < made.seconds(NARROW, 4) < made.seconds(WIDE, 4)


def test_batches_of_a_size_have_a_factor_of_their_own_and_new_ones_that_of_the_others() -> None:
    made = costs()
    observe(made, 10 * MEMORY, 1.2, requests=1)
    observe(made, 10 * MEMORY, 1.6, requests=8)
    assert made.seconds(WIDE, 1) == pytest.approx(1.2 * TAKES[WIDE], rel=0.05)
    assert made.seconds(WIDE, 8) == pytest.approx(1.6 * 8 * TAKES[WIDE], rel=0.05)
    assert 1.2 < made.seconds(WIDE, 4) / (4 * TAKES[WIDE]) < 1.6


def test_a_first_draft_which_may_have_compiled_something_does_not_count() -> None:
    made = costs()
    observe(made, 1, 1000.0)
    assert made.seconds(CHAIN, 4) == made.seconds(CHAIN, 1) * 4 == 4 * TAKES[CHAIN]
    observe(made, MEMORY, 1.2)
    assert made.seconds(CHAIN, 4) == pytest.approx(1.2 * 4 * TAKES[CHAIN], rel=0.05)


def test_what_is_usual_is_known_once_enough_drafts_were_seen() -> None:
    made = costs()
    observe(made, MEMORY - 1, 1.2)
    assert made.usual(CHAIN, 4) is None
    observe(made, 1, 1.2)
    assert made.usual(CHAIN, 4) == pytest.approx(1.2 * 4 * TAKES[CHAIN])
    assert made.usual(CHAIN, 1) is None
