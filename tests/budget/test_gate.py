"""When to draft although it does not pay."""

from __future__ import annotations

from itertools import pairwise

from vllm_redrafter.budget.gate import BEGIN, FAR, GO_ON, Gate, worth_drafting


def opened(gate: Gate, pays: bool, steps: int) -> list[int]:
    return [step for step in range(steps) if gate.opens(pays)]


def test_it_is_open_at_every_step_that_pays() -> None:
    assert opened(Gate(), pays=True, steps=50) == list(range(50))


def test_probes_become_rarer_up_to_the_longest_pause() -> None:
    steps = opened(Gate(first_pause=2, longest_pause=8), pays=False, steps=42)
    pauses = [later - earlier - 1 for earlier, later in pairwise(steps)]
    assert pauses == [2, 4, 8, 8, 8]


def test_where_drafting_is_far_from_paying_pauses_are_longer() -> None:
    gate = Gate(first_pause=2, longest_pause=8, far_pause=32)
    far = [step for step in range(120) if gate.opens(False, gain=FAR - 0.1)]
    assert far[-1] - far[-2] == 33
    near = [step for step in range(40) if gate.opens(False, gain=1.0)]
    assert near[0] <= 8
    assert [later - earlier for earlier, later in pairwise(near)] == [9] * (len(near) - 1)


def test_pauses_begin_anew_after_drafting_has_paid_for_some_steps() -> None:
    gate = Gate(first_pause=2, longest_pause=8)
    opened(gate, pays=False, steps=30)
    opened(gate, pays=True, steps=2)
    assert opened(gate, pays=False, steps=8) == [2, 5]


def test_one_step_that_pays_halves_the_pauses() -> None:
    gate = Gate(first_pause=2, longest_pause=8)
    opened(gate, pays=False, steps=30)
    assert gate.opens(pays=True)
    assert opened(gate, pays=False, steps=16) == [4, 9]


def test_each_kind_of_batch_has_pauses_of_its_own() -> None:
    gate = Gate(first_pause=2, longest_pause=8)
    for _ in range(30):
        gate.opens(False, "sampled", 8)
        gate.opens(True, "greedy", 8)
    steps = [step for step in range(30) if gate.opens(False, "sampled", 8)]
    assert steps[1] - steps[0] == 9


def test_a_size_that_is_new_begins_with_half_of_its_kinds_pauses() -> None:
    gate = Gate(first_pause=2, longest_pause=16)
    opened = [step for step in range(60) if gate.opens(False, "sampled", 8)]
    assert opened[-1] - opened[-2] == 17
    assert [step for step in range(30) if gate.opens(False, "sampled", 11)] == [8, 17]
    assert gate.opens(False, "greedy", 11)


def test_drafts_that_are_as_fast_as_plain_steps_are_not_worth_it() -> None:
    assert not worth_drafting(gain=1.0, so_far=True)
    assert not worth_drafting(gain=1.0, so_far=False)


def test_to_begin_takes_more_than_to_go_on() -> None:
    between = 1.0 + (BEGIN + GO_ON) / 2
    assert worth_drafting(between, so_far=True)
    assert not worth_drafting(between, so_far=False)


def test_steps_that_pass_without_a_question_count_as_if_it_had_been_asked() -> None:
    asked, told = (Gate(first_pause=8, longest_pause=32) for _ in range(2))
    opened_at, step = [], 0
    while step < 200:
        if told.opens(False):
            opened_at.append(step)
            step += 1
            continue
        passing = told.shut_for()
        told.passed(passing)
        step += 1 + passing
    assert opened_at == opened(asked, pays=False, steps=200)


def test_what_pays_by_less_than_the_comparison_may_be_off_is_not_taken_to_pay() -> None:
    for so_far, least in ((True, GO_ON), (False, BEGIN)):
        assert worth_drafting(1.01 + least + 0.05, so_far, doubt=0.05)
        assert not worth_drafting(0.99 + least + 0.05, so_far, doubt=0.05)
