# SPDX-License-Identifier: Apache-2.0
"""Which search each step runs, on machines whose costs are known."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from redrafter_testing.algorithm.budgets import CONFIG, Machine, best_trim, machine, run, survival
from vllm_redrafter.budget.costs import CHAINS, PLAIN, TREES
from vllm_redrafter.budget.planner import (
    BLOCK,
    FIRST_INTERVAL,
    LONGEST_INTERVAL,
    ArmChoice,
    BatchPlanner,
    arms_of,
)
from vllm_redrafter.tree.policy import MATCHES

K = CONFIG.num_speculative_tokens


def choose(choice: ArmChoice, rates: Sequence[float], steps: int) -> list[int]:
    """The arms of so many steps, of which these rates are expected."""
    given = np.zeros(1, np.bool_), 1, lambda: np.array(rates)
    return [choice.next(*given).arm for _ in range(steps)]


def test_a_choice_is_kept_for_a_block_and_left_only_for_the_margin() -> None:
    choice = ArmChoice(())
    assert choose(choice, [1.0, 1.5], 1) == [1]
    assert choose(choice, [9.0, 1.5], BLOCK - 1) == [1] * (BLOCK - 1)
    assert choose(choice, [1.02, 1.0], BLOCK) == [1] * BLOCK
    assert choose(choice, [1.04, 1.0], BLOCK) == [0] * BLOCK


def test_what_drafts_the_most_is_run_first() -> None:
    assert choose(ArmChoice((0, 1, 2)), [2.0, 1.0, 0.5, 0.0], BLOCK + 1) == [2] * BLOCK + [0]


def test_explorations_become_seldom() -> None:
    taken = np.array(choose(ArmChoice((0, 1)), [0.99, 1.0], 3000))
    begins = np.flatnonzero((taken[1:] == 0) & (taken[:-1] == 1)) + 1
    waits = np.diff(begins) - BLOCK
    assert waits[0] == 2 * FIRST_INTERVAL
    assert (np.diff(waits) >= 0).all()
    assert waits[-1] == LONGEST_INTERVAL


def best_yield(machine: Machine, requests: int, accept: float) -> float:
    """Tokens per second of the best that can be run at every step."""
    best = requests / machine.step(PLAIN, requests)
    for shape in arms_of(CONFIG, has_drafter=True):
        ranked = np.sort(survival(shape, 1, accept).ravel())[::-1][:K]
        kind = CHAINS if shape.beam_width == 1 else TREES
        for nodes in range(1, len(ranked) + 1):
            seconds = machine.step(kind, requests * (1 + nodes)) + machine.draft(shape, requests)
            best = max(best, requests * (1.0 + ranked[:nodes].sum()) / seconds)
    return best


def test_it_yields_what_the_best_search_yields() -> None:
    found = []
    for row, (overhead, trees), accept, requests in product(
        (0.005, 0.3), ((0.0, 1.2), (2.0, 1.0)), (0.2, 0.5, 0.8), (1, 8)
    ):
        table = machine(row)
        best = best_yield(Machine(table, overhead, trees), requests, accept)
        at = Machine(table, overhead, trees, noise=0.05, cold=1.3)
        done = run(BatchPlanner(CONFIG, table, 32), at, requests, accept, 600)
        taken = sum(seconds for _, _, seconds, _ in done)
        found.append(sum(tokens for *_, tokens in done) / taken / best)
    assert np.mean(found) >= 0.98
    assert min(found) >= 0.93


def test_a_drafter_that_becomes_good_is_used_and_one_that_becomes_useless_is_left() -> None:
    table = machine(0.1)
    planner, at = BatchPlanner(CONFIG, table, 32), Machine(table, noise=0.05, cold=1.3)
    run(planner, at, 4, 0.1, 1000)
    assert [shape for shape, *_ in run(planner, at, 4, 0.8, 1000)[-300:]].count(None) < 30
    assert [shape for shape, *_ in run(planner, at, 4, 0.02, 400)[100:]].count(None) > 250


def test_greedy_and_sampled_requests_have_their_own_profile() -> None:
    table = machine(0.1)
    planner = BatchPlanner(CONFIG, table, 32)
    before = planner.profile.survival.copy()
    run(planner, Machine(table), 4, 0.9, 100, samples=True)
    greedy, of_sampled = planner.profile.survival
    assert np.array_equal(greedy, before[0])
    assert of_sampled[0, 0] > before[1, 0, 0]
    planner.profile.verified((0.0, 100.0), (0.0, 50.0))
    greedy_ratio, sampled_ratio = planner.verify_costs(4).ratios
    assert sampled_ratio < greedy_ratio == 1.0


def test_no_more_is_searched_than_may_be_verified() -> None:
    planner = BatchPlanner(CONFIG, machine(0.001), 32)
    shapes = set()
    for _ in range(300):
        shape = planner.plan(np.zeros(2, dtype=np.bool_), CONFIG.beam_length - 1)
        shapes.add(shape)
        if shape is not None:
            planner.drafted(survival(shape, 2, 0.9), np.zeros(2, dtype=np.bool_), 0.02)
    assert {shape.beam_width for shape in shapes if shape is not None} == {1}


@pytest.mark.parametrize(("path", "used"), [(0.9, True), (0.02, False)])
def test_matches_alone_are_verified_where_they_yield_more_than_plain_steps_and_drafts(
    path: float, used: bool
) -> None:
    """The drafter's best token is right in a tenth of cases; drafts are expensive."""
    config, requests, accept = replace(CONFIG, context_matches=2), 4, 0.1
    steps = Machine(machine(0.02, level=0.3, config=config), noise=0.05)
    planner = BatchPlanner(config, steps.table, 32)
    sampled, chosen = np.zeros(requests, dtype=np.bool_), []
    alone = np.broadcast_to(path ** np.arange(1, 9), (requests, 2, 8)) * [[1.0], [0.1]]
    for _ in range(1500):
        shape = planner.plan(sampled, K)
        chosen.append(shape)
        explored = np.zeros((requests, 0, 0))
        if shape is not None:
            if shape.beam_length:
                explored = survival(shape, requests, accept)
                planner.drafted(explored, sampled, steps.draft(shape, requests))
            both = [nodes.reshape(requests, -1) for nodes in (alone, explored)]
            nodes = np.sort(np.concatenate(both, axis=1), axis=1)[:, ::-1][:, :K]
            _, choice = best_trim(nodes, sampled, planner.verify_costs(requests))
            planner.matched(choice.tokens_per_second, alone)
        kind = PLAIN if shape is None else CHAINS if shape.beam_width == 1 else TREES
        rows = requests if shape is None else 4 * requests
        planner.stepped(kind, requests, rows, steps.step(kind, rows))
    share = np.mean([shape == MATCHES for shape in chosen[500:]])
    assert share > 0.9 if used else share < 0.1


def test_arms_are_of_a_drafter_and_of_matches_where_there_are_any() -> None:
    assert MATCHES not in BatchPlanner(CONFIG, machine(0.1), 8).arms
    config = replace(CONFIG, context_matches=2)
    table = machine(0.02, config=config)
    table = replace(table, draft=tuple(cost for cost in table.draft if not cost.beam_length))
    assert BatchPlanner(config, table, 8).arms == (None, MATCHES)
