# SPDX-License-Identifier: Apache-2.0
"""The logistic model of acceptance."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from vllm_redrafter.budget import acceptance
from vllm_redrafter.budget.acceptance import (
    DAMPING_OBSERVATIONS,
    MAX_LOG_ODDS,
    STARTING_WEIGHT,
    AcceptanceEstimator,
    RefitSchedule,
    SurvivalProfile,
)
from vllm_redrafter.checkpoints.acceptance import AcceptanceRecord, PerSampling


def observations(
    slope: float, biases: list[float], number: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-odds, depths, accepted) of nodes that behave as the model says."""
    random = torch.Generator().manual_seed(seed)
    log_odds = torch.randn(number, generator=random) * 2
    depths = torch.randint(1, len(biases) + 1, (number,), generator=random)
    p = torch.sigmoid(slope * log_odds + torch.tensor(biases)[depths - 1])
    return log_odds, depths, torch.rand(number, generator=random) < p


def test_refits_find_the_parameters_that_an_optimizer_finds() -> None:
    log_odds, depths, accepted = observations(0.8, [0.4, -0.6], 4000, seed=0)
    estimator = AcceptanceEstimator(2)
    for _ in range(12):
        estimator.observe(log_odds, depths, torch.ones_like(accepted), accepted)
        estimator.refit()

    def loss(theta: list[float]) -> float:
        logits = theta[0] * log_odds + torch.tensor(theta[1:])[depths - 1]
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, accepted.float()))

    best = minimize(loss, [0.5, 0.0, 0.0], method="Nelder-Mead").x
    fitted = [float(estimator.slope), *estimator.biases.tolist()]
    assert fitted == pytest.approx(list(best), abs=0.02)


@pytest.mark.parametrize("easy", [0.5, 0.9, 0.99])
def test_refits_stay_bounded_on_text_that_is_easily_predicted(easy: float) -> None:
    """Undamped Newton steps threw the slope to 100,000 there, and nothing was verified."""
    random, estimator = np.random.default_rng(0), AcceptanceEstimator(5)
    for _ in range(500):
        certain = random.random(32) < easy
        log_odds = np.where(certain, random.normal(9, 3, 32), random.normal(0, 2, 32))
        log_odds = torch.from_numpy(log_odds).float().clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
        accepted = torch.from_numpy(random.random(32) < np.where(certain, 0.998, 0.4))
        depths = torch.from_numpy(random.integers(1, 6, 32))
        estimator.observe(log_odds, depths, torch.ones_like(accepted), accepted)
        estimator.refit()
        assert 0.0 <= float(estimator.slope) < 5.0
        assert float(estimator.biases.abs().max()) < 5.0


@pytest.mark.parametrize("accepted", [0.1, 0.5, 0.95])
def test_the_first_refit_takes_a_drafter_for_what_it_is(accepted: float) -> None:
    """Else a good one is left unused for hundreds of steps, for what it was thought to be."""
    estimator = AcceptanceEstimator(2)
    log_odds, depths = torch.zeros(40), torch.arange(40) % 2 + 1
    right = torch.arange(40) < round(40 * accepted)
    estimator.observe(log_odds, depths, torch.ones(40, dtype=torch.bool), right)
    estimator.refit()
    found = torch.sigmoid(estimator.biases)
    # What the constants say is off by up to half.
    assert (found - accepted).abs().max() < 0.2
    assert estimator.learned.tolist() == [20.0, 20.0]


def test_a_depth_without_judged_nodes_keeps_its_bias() -> None:
    log_odds, _, accepted = observations(0.8, [0.4], 500, seed=2)
    estimator, depths = AcceptanceEstimator(3), torch.arange(500) % 2 + 2
    estimator.observe(log_odds, depths, depths == 2, accepted)
    estimator.refit()
    assert torch.equal(estimator.biases[[0, 2]], torch.tensor([acceptance.INITIAL_BIAS] * 2))
    assert estimator.biases[1] != acceptance.INITIAL_BIAS


def test_refits_wait_twice_as_long_each_time_up_to_the_longest() -> None:
    schedule = RefitSchedule(4, 16)
    due = [step for step in range(1, 61) if schedule.due()]
    assert due == [4, 12, 28, 44, 60]


def test_a_draft_moves_what_it_explored_and_the_rest_moves_along() -> None:
    usual = SurvivalProfile(4, 3).survival
    profile = SurvivalProfile(4, 3)
    profile.drafted(usual[:1, :2, :1] / 2.0, GREEDY)
    greedy, of_sampled = profile.survival / usual
    # As one of so many drafts.
    assert greedy == pytest.approx(np.full((4, 3), 1.0 - 0.5 / (STARTING_WEIGHT + 1)))
    assert (of_sampled == 1.0).all()


def test_an_acceptance_ratio_is_learned_from_what_was_accepted() -> None:
    profile = SurvivalProfile(2, 1)
    assert profile.acceptance_ratio.tolist() == [1.0, 1.0]
    for _ in range(2000):
        profile.verified(expected=(10.0, 5.0), accepted=(8.0, 2.0))
    assert profile.acceptance_ratio == pytest.approx([0.8, 0.4], abs=0.05)


GREEDY = np.zeros(1, dtype=np.bool_)
RECORD = AcceptanceRecord(0.9, (0.3, -0.4), ((0.6, 0.2), (0.3, 0.1)))


def test_a_profile_begins_with_what_was_recorded_and_goes_on_in_the_usual_shape() -> None:
    usual = SurvivalProfile(4, 3).survival[1]
    survival = SurvivalProfile(4, 3, PerSampling(RECORD)).survival[1]
    assert survival[:2, :2] == pytest.approx(np.array(RECORD.survival))
    assert survival[2:] == pytest.approx(usual[2:] * 0.3 / usual[1, 0])
    assert survival[:2, 2] == pytest.approx(usual[:2, 2] * [0.6, 0.3] / usual[:2, 0])
    assert SurvivalProfile(1, 1, PerSampling(RECORD)).survival[0] == pytest.approx(0.6)


def test_a_record_of_nodes_that_were_never_accepted_leaves_room_to_learn() -> None:
    never = AcceptanceRecord(0.5, (-9.0,), ((0.0, 0.0),))
    profile = SurvivalProfile(2, 2, PerSampling(never))
    profile.drafted(np.full((64, 1, 2), 0.8), GREEDY.repeat(64))
    assert np.isfinite(profile.survival).all()
    assert profile.survival[0, 0] == pytest.approx([0.64, 0.64])


def test_an_estimator_begins_with_what_was_recorded_as_firmly_as_it_holds_anything() -> None:
    """The record of one kind stands for the other, too."""
    estimator = AcceptanceEstimator(3, kinds=(2,))
    estimator.start_from(PerSampling(sampled=RECORD))
    for slope, biases in zip(estimator.slope, estimator.biases, strict=True):
        assert [*slope.tolist(), *biases.tolist()] == pytest.approx([0.9, 0.3, -0.4, -0.4])
    assert estimator.learned.tolist() == [[DAMPING_OBSERVATIONS] * 3] * 2
