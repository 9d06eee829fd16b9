"""The budget at work: what it decides on machines whose costs are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vllm_redrafter.budget.batch_budget import (
    CHAINS,
    FIRST_DRAFTS,
    FIRST_STEPS,
    FULL_PROBES,
    KEPT_STEPS,
    LEARNED,
    LEARNING_INTERVAL,
    PLAIN,
    SURVEY_INTERVAL,
    TREES,
    BatchBudget,
    Plan,
    search_tiers,
)
from vllm_redrafter.budget.choice import Flags, Floats
from vllm_redrafter.budget.costs import CostTable, DraftCost, VerifyCost
from vllm_redrafter.budget.drift import MEMORY
from vllm_redrafter.budget.plain_looks import COST, INTERVAL, LOOK, NEW_COST, SETTLING
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.policy import SearchShape, search_shape

CONFIG = ReDrafterConfig(12, beam_width=4, beam_length=5)


def machine(row: float, level: float = 0.02, config: ReDrafterConfig = CONFIG) -> CostTable:
    """A step of one row takes 1 second, each further one `row`; a level of a draft `level`."""
    tiers = search_tiers(config, config.num_speculative_tokens)
    return CostTable(
        target="t",
        drafter="d",
        device="paper",
        draft=tuple(
            DraftCost(n, width, length, level * length * n**0.5)
            for width, length in tiers
            for n in (1, 64)
        ),
        verify=tuple(VerifyCost(rows, 1.0 + row * (rows - 1)) for rows in (1, 1000)),
    )


def survival(shape: SearchShape, requests: int, accept: float) -> Floats:
    """[R, L, W] of a drafter whose best token is right with probability `accept`."""
    by_level = accept ** np.arange(1, shape.beam_length + 1)
    by_rank = 0.4 ** np.arange(shape.beam_width)
    return np.broadcast_to(
        by_level[:, None] * by_rank, (requests, shape.beam_length, shape.beam_width)
    )


def greedy(requests: int) -> Flags:
    """None of them samples."""
    return np.zeros(requests, dtype=np.bool_)


def kind_of(plan: Plan) -> int:
    if plan.shape is None:
        return PLAIN
    return CHAINS if plan.shape.beam_width == 1 else TREES


def run(
    budget: BatchBudget,
    requests: int,
    accept: float,
    steps: int,
    slower: float = 1.0,
    pace: float = 1.0,
    samples: bool = False,
) -> list[tuple[Plan, int]]:
    """Let a drafter of known worth draft: by step, the plan and the nodes verified.

    Steps that verify take `slower` times what the table says, and all, drafts too, `pace` times.
    """
    decided = []
    sampled = np.full(requests, samples)
    for _ in range(steps):
        plan = budget.plan(sampled, None, CONFIG.num_speculative_tokens)
        nodes = 0
        if plan.shape is not None:
            explored = survival(plan.shape, requests, accept)
            draft = budget.costs.draft_seconds(requests, *plan.shape)
            budget.drafted(plan.shape, explored, sampled, pace * draft)
            ranked = np.sort(explored.reshape(requests, -1), axis=1)[:, ::-1][:, :12]
            nodes = int(budget.share(np.array(ranked), requests, plan)[0].sum())
        rows = requests + nodes
        seconds = float(budget.costs.verify_seconds(rows)) * (slower if nodes else 1.0) * pace
        budget.stepped(kind_of(plan) if nodes else PLAIN, requests, rows, seconds)
        decided.append((plan, nodes))
    return decided


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
    assert [plan.shape is None for plan in plans[:first]] == [True] * 8 + [False] * 8
    assert budget.plain_seconds(8) == pytest.approx(1.7, rel=0.02)
    assert not any(plan.pays for plan in plans[first:])


def test_a_useless_drafter_is_hardly_used() -> None:
    decided = run(BatchBudget(CONFIG, machine(row=0.005), 8), 1, 0.01, 1000)
    drafted = [plan for plan, _ in decided if plan.shape is not None]
    assert len(drafted) < FIRST_DRAFTS + 12
    # And yet it is asked now and then.
    assert any(plan.shape is not None for plan, _ in decided[500:])


def test_a_step_that_verifies_is_not_believed_to_take_less_than_a_plain_one() -> None:
    """Or drafts that bring nothing, and of which nothing is verified, would seem to pay."""
    budget = BatchBudget(CONFIG, machine(row=0.005, level=0.001), 32)
    decided = run(budget, 32, 0.01, 400, slower=0.8)
    assert sum(plan.shape is not None for plan, _ in decided[-200:]) < 4


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
    nodes, _ = budget.share(probable, 1, Plan(SearchShape(1, 3), pays=True))
    assert nodes.tolist() == [2]


def test_the_budget_of_a_request_falls_as_the_batch_grows() -> None:
    per_request = []
    for requests in (1, 4, 16, 64):
        decided = run(BatchBudget(CONFIG, machine(row=0.05), 64), requests, 0.8, 60)
        per_request.append(sum(nodes for _, nodes in decided[-10:]) / requests)
    assert per_request == sorted(per_request, reverse=True)
    assert per_request[0] > 2 * per_request[-1]


def test_a_smaller_batch_makes_drafting_pay_at_once() -> None:
    # A row in a large batch costs what it would alone, and a draft comes on top.
    budget = BatchBudget(CONFIG, machine(row=0.5, level=0.2), 64)
    assert run(budget, 64, 0.5, 100)[-1][0].shape is None
    cheap = BatchBudget(CONFIG, machine(row=0.05, level=0.01), 64)
    run(cheap, 64, 0.5, 100)
    assert run(cheap, 1, 0.5, 1)[0][0].pays


def test_a_drafter_that_has_become_good_is_found_out() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.005), 8)
    run(budget, 1, 0.01, 300)
    later = run(budget, 1, 0.9, 1500)
    assert all(plan.pays for plan, _ in later[-50:])


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


def test_a_probe_verifies_something() -> None:
    budget = BatchBudget(CONFIG, machine(row=10.0), 8)
    probes = [nodes for plan, nodes in run(budget, 4, 0.1, 100) if plan.shape and not plan.pays]
    assert probes
    assert min(probes) >= 4


def test_most_probes_are_the_search_that_is_nearest_to_paying() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.3, level=0.2), 8)
    probes = [plan.shape for plan, _ in run(budget, 8, 0.4, 2500) if plan.shape and not plan.pays]
    full = search_shape(CONFIG, 12)
    assert len(probes) > 3 * FULL_PROBES
    assert sum(shape == full for shape in probes) == -(-len(probes) // FULL_PROBES)
    assert set(probes) == {full, SearchShape(1, 1)}


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


def test_chains_that_were_slow_at_first_are_looked_at_while_trees_are_made() -> None:
    """Trees do not tell what chains take, and the first steps of an engine are slow."""
    budget = BatchBudget(CONFIG, machine(row=0.01, level=0.001), 8)
    for kind, slower in ((CHAINS, 1.5), (TREES, 1.0)):
        for _ in range(2 * MEMORY):
            budget.stepped(kind, 1, 6, slower * float(budget.costs.verify_seconds(6)))
    assert kind_of(run(budget, 1, 0.6, FIRST_DRAFTS + 1)[-1][0]) == TREES
    run(budget, 1, 0.6, 1200)
    chains, measured = budget.step_seconds(1, CHAINS)[6], budget.costs.verify_seconds(6)
    assert chains == pytest.approx(float(measured), rel=0.05)


def test_costs_that_turn_out_higher_shut_the_gate() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.01), 8)
    # Long enough to have looked at plain steps.
    assert run(budget, 4, 0.5, 120)[-1][0].pays
    for _ in range(200):
        for _ in range(2):
            budget.stepped(PLAIN, 4, 4, float(budget.costs.verify_seconds(4)))
        for rows in (8, 12, 16, 24, 32):
            for kind in (CHAINS, TREES):
                budget.stepped(kind, 4, rows, 4.0 * float(budget.costs.verify_seconds(rows)))
    # The search is kept for so many steps.
    assert not run(budget, 4, 0.5, KEPT_STEPS + 1)[-1][0].pays


def test_nodes_that_a_request_does_not_want_are_not_given_to_it() -> None:
    budget = BatchBudget(CONFIG, machine(row=0.001), 8)
    wanted = np.full((2, 12), 0.5)
    wanted[0] = 0.0
    nodes, _ = budget.share(wanted, 2, Plan(SearchShape(4, 5), pays=True))
    assert nodes.tolist() == [0, 12]


@pytest.mark.parametrize("max_nodes", [1, 3, 4, 5, 12])
def test_tiers_stay_below_the_maxima_and_fit_the_step(max_nodes: int) -> None:
    tiers = search_tiers(CONFIG, max_nodes)
    assert len(set(tiers)) == len(tiers)
    assert all(w <= 4 and n <= 5 for w, n in tiers)
    if max_nodes < 5:
        assert all(tier.beam_width == 1 and tier.beam_length <= max_nodes for tier in tiers)
