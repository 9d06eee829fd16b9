"""What the budget learns of costs, and what it decides by that."""

from __future__ import annotations

import numpy as np
import pytest

from redrafter_testing.algorithm.budgets import CONFIG, greedy, kind_of, machine, run, survival
from vllm_redrafter.budget.batch_budget import (
    CHAINS,
    FIRST_DRAFTS,
    FIRST_STEPS,
    KEPT_STEPS,
    PLAIN,
    TREES,
    BatchBudget,
    Plan,
)
from vllm_redrafter.budget.choice import best_shares
from vllm_redrafter.budget.drift import MEMORY
from vllm_redrafter.budget.plain_looks import COST, INTERVAL, LOOK, NEW_COST, SETTLING
from vllm_redrafter.tree.policy import SearchShape


def test_a_step_that_verifies_is_not_believed_to_take_less_than_a_plain_one() -> None:
    """Or drafts that bring nothing, and of which nothing is verified, would seem to pay."""
    budget = BatchBudget(CONFIG, machine(row=0.005, level=0.001), 32)
    decided = run(budget, 32, 0.01, 400, slower=0.8)
    assert not any(plan.shape and plan.pays for plan, _ in decided[-200:])


def test_chains_that_take_less_than_plain_steps_are_known_to_take_less_than_trees() -> None:
    """Products of one row are slower than those of four on some processors."""
    budget = BatchBudget(CONFIG, machine(row=0.0), 8)
    for kind, rows, seconds in ((PLAIN, 1, 1.2), (CHAINS, 6, 1.0), (TREES, 6, 1.2)):
        for _ in range(2 * MEMORY):
            budget.stepped(kind, 1, rows, seconds)
    trees, chains = (budget.step_seconds(1, kind)[6] for kind in (TREES, CHAINS))
    assert trees / chains == pytest.approx(1.2, rel=0.05)
    # And yet it is no gain of drafting.
    assert budget.plain_seconds(1) == pytest.approx(chains, rel=0.05)


def test_nothing_is_not_verified_because_plain_steps_seem_cheap() -> None:
    """A step behind a draft is no plain step in a row, and what it takes would not be learned."""
    budget = BatchBudget(CONFIG, machine(row=0.01), 8)
    for kind, rows, seconds in ((PLAIN, 1, 0.5), (CHAINS, 6, 1.05)):
        for _ in range(2 * MEMORY):
            budget.stepped(kind, 1, rows, seconds)
    assert budget.plain_seconds(1) == pytest.approx(0.5, rel=0.05)
    probable = np.array([[0.2, 0.05, 0.01]])
    terms = budget.terms(1, Plan(SearchShape(1, 3), pays=True))
    nodes, _ = best_shares(probable, greedy(1), terms)
    assert nodes.tolist() == [2]


@pytest.mark.parametrize(("accept", "row"), [(0.4, 0.05), (0.8, 0.005)], ids=["close", "clear"])
def test_what_plain_steps_cost_is_looked_at_for_every_size_of_the_batch_and_now_and_then(
    accept: float, row: float
) -> None:
    budget, steps = BatchBudget(CONFIG, machine(row), 64), 3000
    for requests in (1, 8):
        plans = [plan for plan, _ in run(budget, requests, accept, steps)]
        plain = np.array([plan.shape is None for plan in plans])
        turns = np.diff(plain.astype(int), prepend=0)
        starts, ends = np.flatnonzero(turns == 1), np.flatnonzero(turns == -1)
        assert list(ends - starts[: len(ends)]) == [LOOK] * len(ends)
        lost = 1.0 - 1.0 / budget._gain
        assert starts[0] < 20 + LOOK * lost / NEW_COST
        assert len(starts) >= 2
        assert np.diff(starts).min() >= INTERVAL
        assert plain.mean() * lost <= 1.5 * COST


def test_plain_steps_behind_a_draft_say_nothing_of_plain_steps() -> None:
    """vLLM takes longer over a draft's tokens than over one, after the step that verified it; and
    caches are full of the draft for some steps more."""
    budget = BatchBudget(CONFIG, machine(row=0.005), 8)
    usual = float(budget.costs.verify_seconds(4))
    for _ in range(30):
        budget.stepped(TREES, 4, 16, float(budget.costs.verify_seconds(16)))
        for seconds in (*[1.5 * usual] * SETTLING, usual, usual):
            budget.stepped(PLAIN, 4, 4, seconds)
    assert budget.step_seconds(4, PLAIN)[4] == pytest.approx(usual, rel=0.01)


@pytest.mark.parametrize("spell", [20, 40, 160])
@pytest.mark.parametrize("pace", [1.5, 3.0])
def test_a_machine_that_is_slow_for_a_while_does_not_shut_the_gate(spell: int, pace: float) -> None:
    """Else tree steps of a slow moment would be compared with plain ones of a fast one."""
    budget = BatchBudget(CONFIG, machine(row=0.02), 8)
    run(budget, 1, 0.6, 200)
    plans = []
    for _ in range(8):
        plans += run(budget, 1, 0.6, spell, pace=pace)
        plans += run(budget, 1, 0.6, 160)
    undrafted = sum(plan.shape is None for plan, _ in plans)
    # And a look or two at every change, to see whether it was one of the machine.
    assert undrafted <= LOOK * (len(plans) / INTERVAL + 8 * 2 * 2)


def test_what_is_tried_while_the_machine_is_faster_than_it_was_does_not_look_cheap() -> None:
    """Before enough steps of a kind were seen to tell the pace, its drafts tell it."""
    budget = BatchBudget(CONFIG, machine(row=0.005), 8)
    search = SearchShape(4, 5)
    for kind, pace, steps in ((TREES, 2.0, 400), (CHAINS, 1.0, MEMORY)):
        for _ in range(steps):
            draft = pace * budget.costs.draft_seconds(4, *search)
            budget.drafted(search, survival(search, 4, 0.5), greedy(4), draft)
            budget.stepped(kind, 4, 20, pace * float(budget.costs.verify_seconds(20)))
    trees, chains = (budget.step_seconds(4, kind)[20] for kind in (TREES, CHAINS))
    assert chains == pytest.approx(trees, rel=0.15)


def test_a_table_that_is_wrong_is_not_taken_for_a_slow_machine() -> None:
    """Steps that verify take longer than it says, by batch; and each text has trees of its own."""
    budget = BatchBudget(CONFIG, machine(row=0.02), 8)
    for _ in range(20):
        for requests, slower in ((1, 1.6), (2, 1.2), (8, 1.05)):
            for accept in (0.3, 0.6, 0.9):
                run(budget, requests, accept, 15, slower=slower)
    assert budget._pace.now == pytest.approx(1.0, abs=0.05)


def test_a_machine_that_is_slow_for_trees_alone_shuts_the_gate() -> None:
    """What slows one kind of step down is its cost, and not the machine's pace."""
    budget = BatchBudget(CONFIG, machine(row=0.02), 8)
    run(budget, 1, 0.4, 200)
    assert all(plan.shape is None for plan, _ in run(budget, 1, 0.4, 200, slower=2.5)[-5:])


def test_a_plain_step_that_is_cheaper_than_measured_shuts_the_gate() -> None:
    """All steps cost more than the table says, but for plain ones."""
    budget = BatchBudget(CONFIG, machine(row=0.02, level=0.02), 8)
    plans = [plan for plan, _ in run(budget, 8, 0.4, 300, slower=2.0)]
    assert sum(plan.shape is not None for plan in plans[-100:]) < 8


def test_chains_that_were_slow_at_first_are_looked_at_while_trees_are_made() -> None:
    """Trees do not tell what chains take, and the first steps of an engine are slow."""
    budget = BatchBudget(CONFIG, machine(row=0.01, level=0.001), 8)
    for kind, slower in ((CHAINS, 1.5), (TREES, 1.0)):
        for _ in range(2 * MEMORY):
            budget.stepped(kind, 1, 6, slower * float(budget.costs.verify_seconds(6)))
    assert kind_of(run(budget, 1, 0.6, FIRST_STEPS + FIRST_DRAFTS + 1)[-1][0]) == TREES
    run(budget, 1, 0.6, 1200)
    chains, measured = budget.step_seconds(1, CHAINS)[6], budget.costs.verify_seconds(6)
    assert chains == pytest.approx(float(measured), rel=0.05)


def test_costs_that_turn_out_higher_shut_the_gate() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.01), 8)
    # Long enough to have looked at plain steps.
    assert run(budget, 4, 0.5, 180)[-1][0].pays
    for _ in range(200):
        for _ in range(2):
            budget.stepped(PLAIN, 4, 4, float(budget.costs.verify_seconds(4)))
        for rows in (8, 12, 16, 24, 32):
            for kind in (CHAINS, TREES):
                budget.stepped(kind, 4, rows, 4.0 * float(budget.costs.verify_seconds(rows)))
    # The search is kept for so many steps.
    assert not run(budget, 4, 0.5, KEPT_STEPS + 1)[-1][0].pays


def test_what_pays_by_little_is_left_where_steps_vary_by_more() -> None:
    """On a machine that many use, what seems to gain a tenth may gain nothing."""

    def drafted(accept: float, noise: float) -> float:
        budget = BatchBudget(CONFIG, machine(row=0.06, level=0.03), 8)
        decided = run(budget, 4, accept, 2000, noise=noise)
        return float(np.mean([plan.pays and plan.shape is not None for plan, _ in decided[500:]]))

    little, much = 0.35, 0.8
    assert drafted(little, noise=0.0) > 0.9
    assert drafted(little, noise=0.2) < 0.1
    assert drafted(much, noise=0.2) > 0.9
