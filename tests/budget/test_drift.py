"""How costs follow the steps' own times."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_redrafter.budget.drift import LARGEST, Drift


def test_costs_are_as_measured_until_a_step_says_otherwise() -> None:
    assert np.array_equal(Drift(2, [1, 8, 300]).factors(1), np.ones(3))


def test_steady_deviations_are_learned_where_they_are_seen() -> None:
    drift = Drift(2, [1, 16])
    for _ in range(400):
        drift.observe(0, 1, measured=1.0, expected=1.0)
        drift.observe(0, 16, measured=2.0, expected=1.0)
    one, sixteen = drift.factors(0)
    assert one == pytest.approx(1.0, rel=0.1)
    assert sixteen == pytest.approx(2.0, rel=0.1)


def test_what_was_not_seen_follows_what_was() -> None:
    drift = Drift(2, [4, 64])
    for _ in range(100):
        drift.observe(0, 4, measured=1.5, expected=1.0)
    assert drift.factors(1)[0] == pytest.approx(1.5, rel=0.05)
    assert drift.factors(0)[1] == pytest.approx(1.5, rel=0.05)


def test_one_disturbed_step_hardly_moves_a_settled_cost() -> None:
    drift = Drift(1, [4])
    for _ in range(100):
        drift.observe(0, 4, measured=1.0, expected=1.0)
    drift.observe(0, 4, measured=1000.0, expected=1.0)
    assert drift.factors(0)[0] < 1.03
    assert np.exp(LARGEST) == pytest.approx(3.0)


def test_a_change_of_the_machine_is_followed() -> None:
    drift = Drift(1, [4])
    for _ in range(500):
        drift.observe(0, 4, measured=1.0, expected=1.0)
    for _ in range(200):
        drift.observe(0, 4, measured=2.0, expected=1.0)
    assert drift.factors(0)[0] == pytest.approx(2.0, rel=0.1)


def test_sizes_beyond_the_last_count_as_the_last() -> None:
    drift = Drift(1, [2**20])
    drift.observe(0, 2**20, measured=2.0, expected=1.0)
    assert drift.factors(0)[0] > 1.0
