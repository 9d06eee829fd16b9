"""When plain steps are looked at, and which of them tell what one costs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from vllm_redrafter.budget.plain_looks import (
    COST,
    DOUBTFUL,
    INTERVAL,
    LOOK,
    NEW_COST,
    NEW_SIZE,
    SETTLING,
    SHARE,
    SPELL,
    PlainLooks,
)


def looked(
    looks: PlainLooks, steps: int, known: bool = True, gain: float = 1.2, pace: float = 1.0
) -> list[int]:
    """The steps at which a look begins, of a batch that stays as it is."""
    made = []
    for _ in range(steps):
        looks.step(4)
        made.append(looks.wanted(known, gain, pace))
    begun = [step for step, (before, now) in enumerate(pairwise([False, *made])) if now > before]
    assert sum(made) == pytest.approx(LOOK * len(begun), abs=LOOK)
    return begun


def test_looks_are_rarer_the_more_they_lose() -> None:
    for gain in (1.0, 1.5, 3.0):
        begun = looked(PlainLooks(), 8000, gain=gain)
        intervals = {b - a for a, b in pairwise(begun)}
        (interval,) = intervals
        assert interval >= INTERVAL
        lost = LOOK / interval * (1.0 - 1.0 / gain)
        assert lost <= COST
        assert interval < INTERVAL + 2 * LOOK or lost > 0.9 * COST


def test_a_new_size_is_looked_at_once_the_batch_stays_at_it() -> None:
    looks = PlainLooks()
    for _ in range(10):
        assert not looked(looks, NEW_SIZE, known=False, gain=1.05)
        looks.step(16)
        assert not looks.wanted(False, 1.05, 1.0)
    assert looked(looks, NEW_SIZE + 2, known=False, gain=1.05)


@pytest.mark.parametrize("gain", [1.2, 1.5, 3.0])
def test_a_new_size_is_looked_at_later_the_more_that_loses(gain: float) -> None:
    """Answers at one request are a few dozen steps."""
    (first,) = looked(PlainLooks(), int(LOOK / NEW_COST), known=False, gain=gain)[:1]
    assert LOOK * (1.0 - 1.0 / gain) / first == pytest.approx(NEW_COST, rel=0.1)


def test_a_look_that_told_too_little_is_not_made_again_at_once() -> None:
    begun = looked(PlainLooks(), 200, known=False, gain=1.05)
    assert len(begun) > 3
    assert {b - a for a, b in pairwise(begun)} == {NEW_SIZE + 1}


def test_looks_are_made_sooner_where_steps_slowed_down_by_what_drafting_gains() -> None:
    usual, changed = (looked(PlainLooks(), 1000, pace=pace)[0] for pace in (1.0, 2.0))
    assert changed == pytest.approx(usual / DOUBTFUL, abs=1)


@pytest.mark.parametrize("pace", [0.5, 1.9])
def test_no_look_is_made_sooner_where_drafting_pays_all_the_same(pace: float) -> None:
    """A shared machine's pace changes at all times: looks would follow each other."""
    assert looked(PlainLooks(), 2000, gain=2.0, pace=pace) == looked(PlainLooks(), 2000, gain=2.0)


def test_no_look_is_due_where_steps_were_plain_anyway() -> None:
    looks = PlainLooks()
    for _ in range(20):
        assert not looked(looks, INTERVAL - 1)
        looks.shut()


def test_the_first_plain_steps_behind_a_draft_do_not_tell() -> None:
    looks = PlainLooks()
    for _ in range(3):
        assert looks.tells(plain=False)
        told = [looks.tells(plain=True) for _ in range(LOOK)]
        assert told == [False] * SETTLING + [True] * (LOOK - SETTLING)


def test_of_many_plain_steps_in_a_row_some_tell() -> None:
    looks = PlainLooks()
    told = [looks.tells(plain=True) for _ in range(SPELL + 10 * SHARE)]
    assert sum(told[SPELL:]) == 10
