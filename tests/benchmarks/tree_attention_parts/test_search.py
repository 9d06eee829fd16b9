"""From the usual choice to a faster one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from shared_parts.timing import Timing
from tree_attention_parts.report import Cell, Missing
from tree_attention_parts.search import Search, Times


@dataclass(frozen=True)
class Number:
    value: int


class Line:
    """Numbers, of which each has its two neighbours and a time."""

    def __init__(self, times: dict[int, list[float] | str], wrong: Sequence[int] = ()) -> None:
        self.times, self.wrong = times, wrong
        self.asked: list[int] = []

    def measure(self, candidates: Sequence[Number]) -> Times[Number]:
        found: Times[Number] = {}
        for candidate in candidates:
            self.asked.append(candidate.value)
            time = self.times[candidate.value]
            cells: list[Cell] = (
                [Missing(time)] if isinstance(time, str) else [Timing([t]) for t in time]
            )
            for case, cell in enumerate(cells):
                found.setdefault(f"case {case}", {})[candidate] = cell
        return found

    def search(self, usual: int = 10, unconfirmed: Sequence[int] = ()) -> Search[Number]:
        return Search(
            Number(usual),
            check=lambda c: "wrong" if c.value in self.wrong else None,
            confirm=lambda c: "not with fp8" if c.value in unconfirmed else None,
            measure=self.measure,
        )


def neighbours(number: Number) -> list[Number]:
    return [Number(number.value - 1), Number(number.value + 1)]


FALLING: dict[int, list[float] | str] = {n: [200.0 - 10 * n] for n in range(20)}


@pytest.mark.parametrize(("rounds", "best"), [(1, 11), (2, 12), (5, 15)])
def test_each_round_goes_one_step_further(rounds: int, best: int) -> None:
    line = Line(FALLING)
    assert line.search().run(neighbours, rounds) == Number(best)
    assert len(line.asked) == len(set(line.asked))


def test_it_ends_where_no_neighbour_is_faster() -> None:
    line = Line({9: [5.0], 10: [4.0], 11: [3.0], 12: [6.0]})
    assert line.search().run(neighbours, 9) == Number(11)
    assert sorted(line.asked) == [9, 10, 11, 12]


def test_a_gain_within_the_noise_is_none() -> None:
    assert Line({9: [99.0], 10: [100.0], 11: [101.0]}).search().run(neighbours, 1) == Number(10)
    assert Line({9: [97.0], 10: [100.0], 11: [101.0]}).search().run(neighbours, 1) == Number(9)


def test_all_cases_count_alike() -> None:
    """Twice as fast in the short one, a tenth slower in the long one."""
    line = Line({9: [50.0, 1100.0], 10: [100.0, 1000.0], 11: [100.0, 990.0]})
    assert line.search().run(neighbours, 1) == Number(9)


def test_what_is_wrong_is_not_timed_and_the_next_best_takes_its_place() -> None:
    line = Line({9: [50.0], 10: [100.0], 11: [1.0]}, wrong=[11])
    search = line.search()
    assert search.run(neighbours, 1) == Number(9)
    assert 11 not in line.asked and search.failed == {Number(11): "wrong"}


def test_what_fails_at_last_is_not_chosen() -> None:
    search = Line({9: [50.0], 10: [100.0], 11: [70.0]}).search(unconfirmed=[9])
    assert search.run(neighbours, 1) == Number(11)
    assert search.failed == {Number(9): "not with fp8"}


def test_another_may_stand_in_for_a_usual_choice_that_fails() -> None:
    search = Line({9: [50.0], 10: "out of resources", 11: [70.0]}).search()
    chosen = search.run(neighbours, 1)
    assert chosen == Number(9)
    written = search.as_json(chosen)
    assert written["usual_microseconds"] is None
    assert written["microseconds"] == pytest.approx(50)
    assert written["failed"] == [{"value": 10, "reason": "out of resources"}]
    assert "the usual choice failed" in search.said(chosen)


def test_without_any_time_nothing_is_chosen() -> None:
    search = Line(dict.fromkeys((9, 10, 11), "no memory")).search()
    assert search.run(neighbours, 3) is None
    assert search.said(None) == "not timed: no memory"
