"""The budget at work: what it decides on machines whose costs are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from redrafter_testing.algorithm.budgets import CONFIG, greedy, kind_of, machine, run, survival
from vllm_redrafter.budget.batch_budget import (
    FIRST_DRAFTS,
    FIRST_STEPS,
    LEARNED,
    LEARNING_INTERVAL,
    PLAIN,
    SURVEY_INTERVAL,
    BatchBudget,
    Plan,
)
from vllm_redrafter.budget.choice import best_shares
from vllm_redrafter.budget.dips import DIP
from vllm_redrafter.budget.gate import FAR
from vllm_redrafter.budget.plain_looks import LOOK
from vllm_redrafter.budget.probes import FULL_PROBES, SHORTEST
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.tree.policy import SearchShape, search_shape, search_tiers


def test_a_good_drafter_is_used_at_every_step_where_rows_are_cheap() -> None:
    decided = run(BatchBudget(CONFIG, machine(row=0.005), 8), 1, 0.8, 60)
    assert all(plan.pays for plan, _ in decided)
    assert sum(plan.shape is None for plan, _ in decided) <= LOOK
    assert decided[-1][1] > 6


def test_an_engine_sees_plain_steps_before_it_judges_drafts() -> None:
    """What plain steps take would be guessed from steps that verify, which take longer."""
    budget = BatchBudget(CONFIG, machine(row=0.1, level=0.05), 8)
    plans = [plan for plan, _ in run(budget, 8, 0.5, 60, slower=1.5)]
    first = FIRST_STEPS + FIRST_DRAFTS
    drafted = [plan.shape is not None for plan in plans[:first]]
    assert drafted == [False] * FIRST_STEPS + [True] * FIRST_DRAFTS
    assert budget.plain_seconds(8) == pytest.approx(1.7, rel=0.02)
    assert not any(plan.pays for plan in plans[first:])


def test_a_useless_drafter_is_hardly_used() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.005), 8)
    decided = run(budget, 1, 0.01, 1000)
    drafts = [budget.costs.draft_seconds(1, *plan.shape) for plan, _ in decided if plan.shape]
    steps = budget.costs.verify_seconds([1 + nodes for _, nodes in decided]).sum()
    # What it costs, in plain steps of a second, however often it is asked.
    assert sum(drafts) + steps < 1.01 * len(decided)
    # And yet it is asked now and then.
    assert any(plan.shape is not None for plan, _ in decided[500:])


def test_the_budget_of_a_request_falls_as_the_batch_grows() -> None:
    per_request = []
    for requests in (1, 4, 16, 64):
        decided = run(BatchBudget(CONFIG, machine(row=0.05), 64), requests, 0.8, 60)
        per_request.append(sum(nodes for _, nodes in decided[-10:]) / requests)
    assert per_request == sorted(per_request, reverse=True)
    assert per_request[0] > 2 * per_request[-1]


def test_a_smaller_batch_makes_drafting_pay_as_soon_as_it_is_no_dip() -> None:
    # A row in a large batch costs what it would alone, and a draft comes on top.
    budget = BatchBudget(CONFIG, machine(row=0.5, level=0.2), 64)
    assert run(budget, 64, 0.5, 100)[-1][0].shape is None
    cheap = BatchBudget(CONFIG, machine(row=0.05, level=0.01), 64)
    assert not run(cheap, 64, 0.5, 100)[-1][0].pays
    plans = [plan for plan, _ in run(cheap, 1, 0.5, DIP + 1)]
    assert [plan.pays for plan in plans] == [False] * DIP + [True]
    assert all(plan.shape is None for plan in plans[:DIP])


def test_nothing_is_drafted_in_dips_of_a_batch_for_which_drafts_do_not_pay() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.05, level=0.01), 64)
    run(budget, 1, 0.5, 100)
    run(budget, 64, 0.5, 300)
    for _ in range(20):
        assert all(plan.shape is None for plan, _ in run(budget, 1, 0.5, DIP - 1))
        run(budget, 64, 0.5, 20)


def test_dips_of_a_batch_for_which_drafts_pay_are_drafted_for() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.005), 8)
    assert run(budget, 8, 0.8, 100)[-1][0].pays
    assert run(budget, 1, 0.8, 1)[0][0].pays


def test_a_drafter_that_has_become_good_is_found_out() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.005), 8)
    run(budget, 1, 0.01, 300)
    later = run(budget, 1, 0.9, 1500)
    assert all(plan.pays for plan, _ in later[-50:])


def test_what_drafts_cost_behind_plain_steps_is_not_taken_for_what_they_cost() -> None:
    """A probe's first draft is slow, and drafting would never be found to pay by it."""
    budget = BatchBudget(CONFIG, machine(row=0.05), 8)
    assert not run(budget, 4, 0.01, 300, cold=1.5)[-1][0].pays
    later = run(budget, 4, 0.5, 1500, cold=1.5)
    assert all(plan.pays for plan, _ in later[-50:])
    assert 1.0 < budget._gain < 1.5


def test_deeper_levels_are_looked_at_again_after_they_were_found_useless() -> None:
    """As a first, pessimistic calibration finds them: the acceptance of deep nodes rises later."""
    config = ReDrafterConfig(4, beam_width=1, beam_length=4)
    budget = BatchBudget(config, machine(row=0.005, level=0.001, config=config), 64)

    def draft(accept: float) -> SearchShape | None:
        plan = budget.plan(greedy(64), None, 4)
        if plan.shape is not None:
            explored = survival(plan.shape, 64, accept)
            seconds = budget.costs.draft_seconds(64, *plan.shape)
            budget.drafted(plan.shape, explored, greedy(64), seconds)
        budget.stepped(PLAIN, 64, 64, float(budget.costs.verify_seconds(64)))
        return plan.shape

    early = [draft(0.35) for _ in range(100)]
    assert early[-1] == SearchShape(1, 1)
    later = [draft(0.9) for _ in range(100)]
    chosen = [shape for shape in later[-20:] if shape is not None]
    assert len(chosen) >= 19
    assert sum(shape.beam_length == 4 for shape in chosen) > 15


def test_a_probe_verifies_something() -> None:
    budget = BatchBudget(CONFIG, machine(row=10.0), 8)
    probes = [nodes for plan, nodes in run(budget, 4, 0.1, 100) if plan.shape and not plan.pays]
    assert probes
    assert min(probes) >= 4


def test_what_a_probe_verifies_is_reckoned_in_what_it_loses() -> None:
    """A draft alone loses little, the steps that verify it as much as their rows take."""
    budget, steps = BatchBudget(CONFIG, machine(row=0.02), 64), 1000
    seconds = 0.0
    for plan, nodes in run(budget, 32, 0.02, steps):
        seconds += float(budget.costs.verify_seconds(32 + nodes))
        if plan.shape is not None:
            seconds += budget.costs.draft_seconds(32, *plan.shape)
    assert seconds < 1.015 * steps * float(budget.costs.verify_seconds(32))


def test_most_probes_are_the_search_that_is_nearest_to_paying() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.3, level=0.2), 8)
    shapes = [None if plan.pays else plan.shape for plan, _ in run(budget, 8, 0.4, 8000)]
    probes = [list(drafts) for shape, drafts in itertools.groupby(shapes) if shape]
    full = search_shape(CONFIG, 12)
    assert len(probes) > 3 * FULL_PROBES
    assert sum(full in drafts for drafts in probes) == -(-len(probes) // FULL_PROBES)
    assert {shape for drafts in probes for shape in drafts} == {full, SearchShape(1, 1)}


def test_a_probe_that_found_drafting_to_pay_is_not_continued_when_it_has_ceased_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = BatchBudget(CONFIG, machine(row=0.3, level=0.2), 8)
    while run(budget, 4, 0.4, 1)[-1][0].shape is None or budget._pays:
        pass
    assert budget._probes.left == SHORTEST - 1
    for pays in (True, False):
        budget._kept = 0
        monkeypatch.setattr(budget, "_best_search", lambda *_, p=pays: (budget._best, p))
        plan = budget.plan(greedy(4), None, 12)
    assert plan.shape is None


@pytest.mark.parametrize(("level", "reconsidered"), [(0.2, False), (0.05, True)])
def test_requests_that_join_are_no_reason_to_reconsider_what_is_far_from_paying(
    level: float, reconsidered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = BatchBudget(CONFIG, machine(row=0.3, level=level), 8)
    while run(budget, 4, 0.5, 300)[-1][0].shape is not None:
        pass  # behind a probe all is reconsidered in any case
    assert (budget._gain >= FAR) == reconsidered and not budget._pays
    asked: list[int] = []
    monkeypatch.setattr(
        budget, "_best_search", lambda *_: (asked.append(1), (budget._best, False))[1]
    )
    budget.plan(greedy(4), np.array([True, True, False, False]), 12)
    assert bool(asked) == reconsidered


@pytest.mark.parametrize("accept", [0.1, 0.8], ids=["shut", "open"])
def test_a_plan_that_holds_for_several_steps_is_what_would_be_planned_for_each(
    accept: float,
) -> None:
    """But for surveys and looks, which are made a few steps later."""
    kinds = []
    for asks in (True, False):
        budget = BatchBudget(CONFIG, machine(row=0.05), 8)
        plan, holds, planned = Plan(None, pays=False), 0, []
        for _ in range(1500):
            if holds and not asks:
                holds -= 1
                budget.again()
            else:
                plan = budget.plan(greedy(2), None, 12)
                holds = plan.steps - 1
            if plan.shape is not None and budget.learns:
                explored = survival(plan.shape, 2, accept)
                seconds = budget.costs.draft_seconds(2, *plan.shape)
                budget.drafted(plan.shape, explored, greedy(2), seconds)
            rows = 2 if plan.shape is None else 8
            budget.stepped(kind_of(plan), 2, rows, float(budget.costs.verify_seconds(rows)))
            planned.append(kind_of(plan))
        kinds.append(np.bincount(planned, minlength=3) / len(planned))
    assert np.abs(kinds[0] - kinds[1]).max() < 0.05


def test_what_is_known_well_is_learned_from_now_and_then() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.005), 8)
    learned, holds = [], 0
    for _ in range(LEARNED + 400):
        if holds:
            holds -= 1
            budget.again()
        else:
            plan = budget.plan(greedy(1), None, 12)
            holds = plan.steps - 1
        learned.append(budget.learns)
        if plan.shape is not None and budget.learns:
            draft = budget.costs.draft_seconds(1, *plan.shape)
            budget.drafted(plan.shape, survival(plan.shape, 1, 0.8), greedy(1), draft)
        budget.stepped(kind_of(plan), 1, 8, float(budget.costs.verify_seconds(8)))
    assert all(learned[:LEARNED])
    assert np.mean(learned[-100:]) < 2 / LEARNING_INTERVAL


def test_short_searches_are_chosen_where_levels_are_dear() -> None:
    cheap = run(BatchBudget(CONFIG, machine(row=0.01, level=0.001), 8), 1, 0.7, 60)[-1][0]
    dear = run(BatchBudget(CONFIG, machine(row=0.01, level=0.3), 8), 1, 0.7, 60)[-1][0]
    assert cheap.shape is not None
    assert dear.shape is not None
    assert cheap.shape.beam_length > dear.shape.beam_length


def test_a_decision_does_not_flip_with_noise() -> None:
    random = np.random.default_rng(0)
    budget = BatchBudget(CONFIG, machine(row=0.02), 8)
    flips = []
    for _ in range(400):
        plan = run(budget, 2, 0.4, 1)[0][0]
        kind = kind_of(plan)
        rows = 2 if plan.shape is None else 6
        seconds = float(budget.costs.verify_seconds(rows)) * random.lognormal(0.0, 0.2)
        budget.stepped(kind, 2, rows, seconds)
        flips.append(plan.pays)
    changes = sum(a != b for a, b in itertools.pairwise(flips[50:]))
    assert changes < 20


def test_requests_that_sample_are_judged_by_their_like() -> None:
    """A server that is asked for greedy answers, then for sampled ones, and in turn."""
    budget = BatchBudget(CONFIG, machine(row=0.02, level=0.05), 8)
    greedy_plans, sampled_plans = [], []
    for _ in range(6):
        greedy_plans += run(budget, 2, 0.7, 100)
        sampled_plans += run(budget, 2, 0.02, 100, samples=True)
    for plans, drafts in ((greedy_plans[300:], True), (sampled_plans[300:], False)):
        drafted = sum(plan.shape is not None for plan, _ in plans)
        assert drafted > 0.9 * len(plans) if drafts else drafted < 0.1 * len(plans)


def test_of_a_mixed_batch_the_mean_is_expected() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.02), 8)
    run(budget, 4, 0.8, 200)
    run(budget, 4, 0.1, 200, samples=True)
    budget.plan(np.array([True, False, False, False]), None, 12)
    mixed = budget._survival(4)[0, 0]
    assert mixed == pytest.approx((3 * 0.8 + 0.1) / 4, abs=0.05)


def test_new_requests_are_expected_to_be_as_usual() -> None:
    """The last one of a queue was hard; its gate is not that of those behind it."""
    budget = BatchBudget(CONFIG, machine(row=0.02, level=0.1), 8)
    run(budget, 8, 0.7, 400)
    run(budget, 1, 0.02, 60)
    assert not budget.plan(greedy(8), None, 12).pays
    assert budget.plan(greedy(8), np.full(8, True), 12).pays


def test_full_searches_are_rarer_where_they_are_dear() -> None:
    surveys = []
    for level in (0.001, 0.1):
        config = ReDrafterConfig(12, beam_width=4, beam_length=8)
        budget = BatchBudget(config, machine(row=0.05, level=level, config=config), 8)
        plans = [plan for plan, _ in run(budget, 8, 0.5, 1200) if plan.shape]
        full = search_shape(config, 12)
        surveys.append(sum(plan.shape == full for plan in plans[200:]) / len(plans[200:]))
    cheap, dear = surveys
    assert cheap == pytest.approx(1 / SURVEY_INTERVAL, rel=0.05)
    assert dear < cheap / 2


def test_nodes_that_a_request_does_not_want_are_not_given_to_it() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.001), 8)
    wanted = np.full((2, 12), 0.5)
    wanted[0] = 0.0
    terms = budget.terms(2, Plan(SearchShape(4, 5), pays=True))
    nodes, _ = best_shares(wanted, greedy(2), terms)
    assert nodes.tolist() == [0, 12]


@pytest.mark.parametrize("max_nodes", [1, 3, 4, 5, 12])
def test_tiers_stay_below_the_maxima_and_fit_the_step(max_nodes: int) -> None:
    tiers = search_tiers(CONFIG, max_nodes)
    assert len(set(tiers)) == len(tiers)
    assert all(w <= 4 and n <= 5 for w, n in tiers)
    if max_nodes < 5:
        assert all(tier.beam_width == 1 and tier.beam_length <= max_nodes for tier in tiers)


def test_drafts_that_bring_less_than_their_calibration_says_are_given_up() -> None:
    """Requests that sample, apart: of greedy ones nothing was promised in vain."""
    for kind in (greedy(4), ~greedy(4)):
        budget = BatchBudget(CONFIG, machine(row=0.1), max_requests=4)
        run(budget, requests=4, accept=0.5, steps=200, samples=bool(kind[0]))
        assert budget.plan(kind, None, CONFIG.num_speculative_tokens).pays
        for _ in range(1000):
            budget.verified((0.0, 2.0), (0.0, 0.5))
        plans = [plan for plan, _ in run(budget, 4, 0.5, steps=64, samples=bool(kind[0]))]
        assert plans[-1].pays != bool(kind[0])
