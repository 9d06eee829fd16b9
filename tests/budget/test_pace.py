"""How slow the machine is, by the steps' own times."""

from __future__ import annotations

import pytest

from vllm_redrafter.budget.pace import WINDOW, Pace


def after(*seconds: float, usual: float = 2.0) -> float:
    pace = Pace()
    for took in seconds:
        pace.observe(took / usual)
    return pace.now


def test_the_pace_is_as_usual_until_steps_say_otherwise() -> None:
    assert after() == 1.0


def test_half_the_speed_is_noticed_within_half_of_the_window() -> None:
    assert after(*[4.0] * (WINDOW // 2 + 1)) == pytest.approx(2.0)


def test_a_disturbance_of_a_few_steps_is_not_the_machines_pace() -> None:
    assert after(*[1000.0] * (WINDOW // 2)) == 1.0


def test_most_of_the_pace_is_taken_out_of_a_step() -> None:
    pace = Pace()
    assert pace.without(3.0) == 3.0
    for _ in range(WINDOW):
        pace.observe(2.0)
    assert pace.without(6.0) == pytest.approx(3.0, rel=0.05)


def test_a_machine_that_is_as_usual_again_is_noticed() -> None:
    assert after(*[4.0] * 50, *[2.0] * (WINDOW // 2 + 1)) == 1.0
