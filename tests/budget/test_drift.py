"""How costs follow the steps' own times."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_redrafter.budget.drift import (
    FORGOTTEN,
    LEAST,
    MEMORY,
    RENEWAL,
    Drift,
    median_error,
)

TABLE = np.linspace(1.0, 2.0, 101)


def observe(drift: Drift, times: int, seconds: float, requests: int = 4, size: int = 4) -> None:
    for _ in range(times):
        drift.observe(0, requests, size, seconds)


def test_costs_are_as_measured_until_a_step_says_otherwise() -> None:
    assert np.array_equal(Drift([TABLE, 2 * TABLE]).seconds(1, 8), 2 * TABLE)


def test_what_all_steps_take_beyond_the_table_is_added_to_every_size() -> None:
    """However much more it is than the table's own: a small target's step is mostly host work."""
    drift = Drift([TABLE])
    for size in (4, 50, 100):
        observe(drift, 50, TABLE[size] + 9.0, size=size)
    assert drift.seconds(0, 4)[1:] == pytest.approx(TABLE[1:] + 9.0, rel=0.02)


def test_steady_deviations_are_learned_where_they_are_seen() -> None:
    drift = Drift([TABLE])
    observe(drift, 400, 1.0, size=4)
    observe(drift, 400, 2.0, size=64)
    assert drift.seconds(0, 4)[4] == pytest.approx(1.0, rel=0.1)
    assert drift.seconds(0, 4)[64] == pytest.approx(2.0, rel=0.1)


def test_what_was_not_seen_follows_what_was() -> None:
    drift = Drift([TABLE, TABLE])
    observe(drift, 100, TABLE[4] + 0.5)
    for seen in (drift.seconds(1, 4)[4], drift.seconds(0, 64)[4]):
        assert seen == pytest.approx(TABLE[4] + 0.5, rel=0.1)
    assert drift.seconds(0, 4)[64] == pytest.approx(TABLE[64] + 0.5, rel=0.1)


def test_a_kind_that_was_not_tried_is_believed_to_be_as_cheap_as_the_cheapest() -> None:
    """What is believed to be as dear as what is done already would never be tried."""
    drift = Drift([TABLE, TABLE, TABLE])
    for kind, excess in ((0, 0.1), (2, 2.0)):
        for _ in range(50):
            drift.observe(kind, 4, 16, TABLE[16] + excess)
    assert drift.seconds(1, 4)[16] == pytest.approx(TABLE[16] + 0.1)
    assert drift.seconds(2, 4)[16] == pytest.approx(TABLE[16] + 2.0, rel=0.1)


@pytest.mark.parametrize("requests", [2, 4, 8])
def test_what_was_dear_for_other_batches_is_believed_to_be_as_much_dearer_by_request(
    requests: int,
) -> None:
    """Else trees would be tried for each number of requests, where they do not pay for any."""
    drift = Drift([TABLE, TABLE])
    for number, excess in ((1, 0.1), (requests, 1.0)):
        for _ in range(50):
            drift.observe(0, number, 16, TABLE[16] + excess)
    for _ in range(50):
        drift.observe(1, 1, 16, TABLE[16] + 0.1 + 0.7)
    expected = TABLE[16] + 1.0 + requests * 0.7
    assert drift.seconds(1, requests)[16] == pytest.approx(expected, rel=0.1)
    assert drift.seconds(0, 16)[16] < drift.seconds(1, 16)[16]


@pytest.mark.parametrize("requests", [1, 8])
def test_what_a_kind_took_less_for_other_numbers_of_requests_it_takes_less_here(
    requests: int,
) -> None:
    """Else plain steps would be believed to be as dear as those that verify, until one is seen."""
    drift = Drift([TABLE, TABLE])
    for _ in range(50):
        drift.observe(0, 4, 4, TABLE[4] + 0.5)
        drift.observe(1, 4, 16, TABLE[16] + 2.0)
        drift.observe(1, requests, 16, TABLE[16] + 3.0)
    # Of what it took less, no more than that, and for fewer requests by request.
    less = 1.5 * min(requests / 4, 1.0)
    assert drift.seconds(0, requests)[4] == pytest.approx(TABLE[4] + 3.0 - less, rel=0.1)
    # Once steps were seen, they alone tell.
    for _ in range(50):
        drift.observe(0, requests, 4, TABLE[4] + 2.9)
    assert drift.seconds(0, requests)[4] == pytest.approx(TABLE[4] + 2.9, rel=0.05)


def test_what_was_seen_long_ago_may_have_become_cheaper() -> None:
    drift = Drift([TABLE, TABLE])
    for _ in range(8):
        drift.observe(1, 4, 16, TABLE[16] + 2.0)
    observe(drift, 2 * MEMORY, TABLE[4])
    soon = drift.seconds(1, 4)[16]
    observe(drift, 4 * FORGOTTEN, TABLE[4])
    late = drift.seconds(1, 4)[16]
    assert TABLE[16] < late < TABLE[16] + 1.0 < soon


def test_batches_of_different_sizes_have_costs_of_their_own() -> None:
    drift = Drift([TABLE])
    observe(drift, 100, 2.0, requests=1, size=16)
    observe(drift, 100, 6.0, requests=8, size=16)
    assert drift.seconds(0, 1)[16] == pytest.approx(2.0, rel=0.25)
    assert drift.seconds(0, 8)[16] == pytest.approx(6.0, rel=0.1)


def test_disturbed_steps_hardly_move_a_settled_cost() -> None:
    drift = Drift([TABLE])
    observe(drift, 100, 1.5)
    observe(drift, MEMORY // 2, 1000.0)
    assert drift.seconds(0, 4)[4] == pytest.approx(1.5, rel=0.01)


def test_the_first_step_of_a_kind_does_not_count() -> None:
    """It may have compiled something."""
    drift = Drift([TABLE, TABLE])
    observe(drift, 50, TABLE[4])
    drift.observe(1, 4, 16, 1000.0)
    assert drift.seconds(1, 4) == pytest.approx(TABLE)


def test_slow_first_steps_do_not_speak_against_a_size() -> None:
    drift = Drift([TABLE])
    observe(drift, 3, 50.0)
    observe(drift, 2, 1.5)
    assert drift.seconds(0, 4)[4] == pytest.approx(1.5, rel=0.3)


def test_a_change_of_the_machine_is_followed() -> None:
    drift = Drift([TABLE])
    observe(drift, 500, 1.0)
    assert drift.seconds(0, 4)[4] == pytest.approx(1.0, rel=0.1)
    observe(drift, MEMORY + RENEWAL, 2.0)
    assert drift.seconds(0, 4)[4] == pytest.approx(2.0, rel=0.1)


def test_what_is_usual_is_known_of_what_was_seen_often() -> None:
    drift = Drift([TABLE, TABLE])
    observe(drift, MEMORY, 1.5)
    assert drift.usual(0, 4, 4) is None
    observe(drift, 1, 1.5)
    assert drift.usual(0, 4, 4) == pytest.approx(1.5)
    assert drift.usual(1, 4, 4) is drift.usual(0, 64, 4) is drift.usual(0, 4, 64) is None


def test_what_is_usual_leans_on_nothing_else() -> None:
    """What was learned from an estimate that leans would move the estimate, and so on."""
    drift = Drift([TABLE])
    observe(drift, MEMORY + 1, 1.5)
    observe(drift, MEMORY + RENEWAL, 9.0, size=64)
    assert drift.usual(0, 4, 4) == pytest.approx(1.5)
    assert drift.seconds(0, 4)[4] > 1.55


def test_a_cost_stays_above_nothing() -> None:
    drift = Drift([TABLE])
    observe(drift, 100, 0.001)
    assert (drift.seconds(0, 4) >= LEAST * TABLE).all()


def test_sizes_beyond_the_last_cell_count_as_the_last() -> None:
    drift = Drift([np.ones(2**17)])
    observe(drift, 2, 5.0, requests=2**17, size=2**17 - 1)
    assert drift.seconds(0, 2**17)[-1] > 1.0


def test_the_error_of_a_median_is_how_far_medians_of_like_steps_lie_apart() -> None:
    steps = np.random.default_rng(0).normal(5.0, 0.4, size=(4000, MEMORY))
    apart = np.median(steps, axis=1).std()
    assert np.mean([median_error(of_one) for of_one in steps]) == pytest.approx(apart, rel=0.15)


def test_an_interrupted_step_does_not_make_the_others_doubtful() -> None:
    steps = np.random.default_rng(0).normal(5.0, 0.4, size=MEMORY)
    interrupted = np.where(np.arange(MEMORY) == MEMORY // 2, 50.0, steps)
    assert median_error(interrupted) < 1.5 * median_error(steps)


def test_doubt_is_a_share_of_the_steps_time_and_none_of_what_was_hardly_seen() -> None:
    drift, steps = Drift([TABLE]), np.random.default_rng(0).normal(3.0, 0.3, size=MEMORY)
    for seconds in steps[:-1]:
        drift.observe(0, 4, 4, seconds)
    assert drift.doubt(0, 4, 4) == 0.0
    # The first step of its kind does not count.
    for seconds in steps[-2:]:
        drift.observe(0, 4, 4, seconds)
    assert drift.doubt(0, 4, 4) == pytest.approx(0.3 * 1.25 / 4 / 3.0, rel=0.4)
    assert drift.doubt(0, 64, 64) == 0.0
