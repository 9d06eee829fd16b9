# SPDX-License-Identifier: Apache-2.0
"""The logistic model of acceptance."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    log_odds_of,
    usual_profile,
)
from vllm_redrafter.checkpoints.acceptance import AcceptanceRecord
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.token_tree import TokenTree


def search(seed: int, requests: int = 3, length: int = 4, width: int = 3) -> ExploredNodes:
    """A search's nodes, of random probabilities; some slots are filled by no beam."""
    random = torch.Generator().manual_seed(seed)
    pointers = torch.randint(0, width, (requests, length, width), generator=random)
    pointers[:, 0] = 0
    given_parent = torch.rand(requests, length, width, generator=random).clamp(1e-3, 1.0).log()
    given_parent[:, 0, -1] = -torch.inf
    levels = [given_parent[:, 0]]
    for level in range(1, length):
        levels.append(levels[-1].gather(1, pointers[:, level]) + given_parent[:, level])
    tokens = torch.arange(requests * length * width).view(requests, length, width)
    return ExploredNodes(tokens, pointers, torch.stack(levels, dim=1))


def survival_of(estimator: AcceptanceEstimator, explored: ExploredNodes) -> tuple[Tensor, Tensor]:
    log_odds = log_odds_of(explored.log_probs, explored.back_pointers)
    return log_odds, estimator.log_survival(log_odds, explored.log_probs, explored.back_pointers)


def test_slope_one_and_no_bias_leave_the_drafts_own_probabilities() -> None:
    explored = search(0)
    estimator = AcceptanceEstimator(4)
    estimator.slope.fill_(1.0)
    estimator.biases.fill_(0.0)
    _, survival = survival_of(estimator, explored)
    torch.testing.assert_close(survival, explored.log_probs, rtol=1e-4, atol=1e-5)


def test_a_node_survives_if_every_node_of_its_path_does() -> None:
    explored = search(1, requests=1)
    estimator = AcceptanceEstimator(4)
    estimator.biases.copy_(torch.tensor([0.5, -0.1, -0.7, 0.2]))
    log_odds, survival = survival_of(estimator, explored)
    beam, expected = 1, 0.0
    for level in reversed(range(4)):
        p = torch.sigmoid(estimator.slope * log_odds[0, level, beam] + estimator.biases[level])
        expected += float(p.log())
        beam = int(explored.back_pointers[0, level, beam])
    assert float(survival[0, 3, 1]) == pytest.approx(expected, abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    slope=st.floats(0.0, 3.0),
    bias=st.floats(-5.0, 5.0),
    max_nodes=st.integers(1, 20),
)
def test_trees_ranked_by_survival_are_trees_in_every_prefix(
    seed: int, slope: float, bias: float, max_nodes: int
) -> None:
    explored = search(seed)
    estimator = AcceptanceEstimator(4)
    estimator.slope.fill_(slope)
    estimator.biases.fill_(bias)
    _, survival = survival_of(estimator, explored)
    ranked = ExploredNodes(explored.tokens, explored.back_pointers, survival)
    tree = TokenTree.from_explored(torch.arange(3), ranked, max_nodes)
    before = torch.arange(tree.tokens.shape[1])
    assert (tree.parents[:, 1:] < before[1:])[tree.is_node[:, 1:]].all()
    # The empty slots of the search are no nodes.
    assert (
        tree.num_nodes - 1 == (explored.log_probs > -torch.inf).sum((1, 2)).clamp(max=max_nodes)
    ).all()


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


def predictable(
    random: np.random.Generator, number: int, easy: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-odds, depths, accepted, its probability): a share is certain, by the draft and in fact,
    but for one in 500; the others are guesses."""
    certain = random.random(number) < easy
    log_odds = np.where(certain, random.normal(9, 3, number), random.normal(0, 2, number))
    probability = np.where(certain, 0.998, 0.4)
    accepted = random.random(number) < probability
    depths = random.integers(1, 6, number)
    made = (log_odds.clip(-MAX_LOG_ODDS, MAX_LOG_ODDS).astype(np.float32), depths, accepted)
    return (*map(torch.from_numpy, made), torch.from_numpy(probability).float())  # type: ignore[return-value]


@pytest.mark.parametrize("easy", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_learned_holds_on_text_that_is_easily_predicted(easy: float, seed: int) -> None:
    """As Newton's steps were, they threw the slope to 100,000 there, and nothing was verified."""
    random, estimator = np.random.default_rng(seed), AcceptanceEstimator(5)
    lost = []
    for step in range(2000):
        log_odds, depths, accepted, probability = predictable(random, 8, easy)
        logits = estimator.slope * log_odds + estimator.biases[depths - 1]
        entropy = torch.nn.functional.binary_cross_entropy_with_logits
        best = entropy(torch.logit(probability), probability)
        lost.append(float(entropy(logits, probability) - best))
        estimator.observe(log_odds, depths, torch.ones_like(accepted), accepted)
        if step % 4 == 3:
            estimator.refit()
            assert 0.0 <= float(estimator.slope) < 5.0
            assert float(estimator.biases.abs().max()) < 5.0
    # Of constants, what the two kinds of nodes are alike in is most: 0.07 is the best slope's.
    assert sum(lost[400:]) / len(lost[400:]) < 0.1


def test_one_surprise_does_not_undo_what_was_learned() -> None:
    estimator = AcceptanceEstimator(1)
    log_odds, depths = torch.full((32,), 6.0), torch.ones(32, dtype=torch.int64)
    judged = torch.ones(32, dtype=torch.bool)
    for _ in range(100):
        estimator.observe(log_odds, depths, judged, judged)
        estimator.refit()
    accepted = judged.clone()
    accepted[0] = False
    estimator.observe(log_odds, depths, judged, accepted)
    estimator.refit()
    assert float(torch.sigmoid(estimator.slope * 6.0 + estimator.biases)) > 0.9


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


def test_later_refits_weigh_new_nodes_against_those_before() -> None:
    estimator = AcceptanceEstimator(1)
    every, depths = torch.ones(50, dtype=torch.bool), torch.ones(50, dtype=torch.int64)
    half = torch.arange(50) % 2 == 0
    for _ in range(20):
        estimator.observe(torch.zeros(50), depths, every, half)
        estimator.refit()
    assert float(estimator.learned) == acceptance.DAMPING_OBSERVATIONS
    before = float(estimator.biases)
    estimator.observe(torch.zeros(50), depths, every, every)
    estimator.refit()
    # All of Newton's step is the gradient, 25, over the information, 12.5 and the ridge.
    assert float(estimator.biases) - before == pytest.approx(0.5 * 25 / 13, abs=0.02)


def test_what_was_not_judged_teaches_nothing() -> None:
    log_odds, depths, accepted = observations(0.8, [0.4, -0.6], 500, seed=1)
    taught, untaught = AcceptanceEstimator(2), AcceptanceEstimator(2)
    taught.observe(log_odds, depths, torch.zeros_like(accepted), accepted)
    taught.refit()
    assert torch.equal(taught.slope, untaught.slope)
    assert torch.equal(taught.biases, untaught.biases)


def test_a_depth_without_observations_keeps_its_bias() -> None:
    log_odds, _, accepted = observations(0.8, [0.4], 500, seed=2)
    estimator = AcceptanceEstimator(3)
    estimator.observe(log_odds, torch.full((500,), 2), torch.ones_like(accepted), accepted)
    estimator.refit()
    untouched = torch.tensor([acceptance.INITIAL_BIAS] * 2)
    assert torch.equal(estimator.biases[[0, 2]], untouched)
    assert estimator.biases[1] != acceptance.INITIAL_BIAS


def test_the_slope_stays_positive_even_if_the_drafter_is_wrong_where_it_is_sure() -> None:
    log_odds = torch.linspace(-3, 3, 600)
    estimator = AcceptanceEstimator(1)
    for _ in range(5):
        estimator.observe(log_odds, torch.ones(600), torch.ones(600).bool(), log_odds < 0)
        estimator.refit()
    assert float(estimator.slope) >= 0


def test_one_observation_moves_little() -> None:
    estimator = AcceptanceEstimator(1)
    estimator.observe(
        torch.tensor([3.0]), torch.tensor([1]), torch.tensor([True]), torch.tensor([False])
    )
    estimator.refit()
    assert abs(float(estimator.slope) - acceptance.INITIAL_SLOPE) < 0.2


def test_probabilities_of_one_and_empty_slots_have_finite_log_odds() -> None:
    pointers = torch.zeros(1, 2, 2, dtype=torch.int64)
    log_probs = torch.tensor([[[0.0, -torch.inf], [0.0, -torch.inf]]])
    log_odds = log_odds_of(log_probs, pointers)
    assert log_odds.abs().max() <= acceptance.MAX_LOG_ODDS
    assert torch.isfinite(log_odds).all()


def test_refits_wait_twice_as_long_each_time_up_to_the_longest() -> None:
    schedule = RefitSchedule(4, 16)
    due = [step for step in range(1, 61) if schedule.due()]
    assert due == [4, 12, 28, 44, 60]


def test_a_draft_moves_what_it_explored_and_the_rest_moves_along() -> None:
    usual = usual_profile(4, 3)
    profile = SurvivalProfile(4, 3)
    profile.drafted(usual[None, :2, :1] / 2.0)
    moved = profile.survival / usual
    # As one of so many drafts.
    expected = 1.0 - 0.5 / (STARTING_WEIGHT + 1)
    assert moved == pytest.approx(np.full((4, 3), expected))


def test_an_acceptance_ratio_is_learned_from_what_was_accepted() -> None:
    profile = SurvivalProfile(2, 1)
    assert profile.acceptance_ratio == 1.0
    for _ in range(2000):
        profile.verified(expected=10.0, accepted=8.0)
    assert profile.acceptance_ratio == pytest.approx(0.8, abs=0.02)


RECORD = AcceptanceRecord(0.9, (0.3, -0.4), ((0.6, 0.2), (0.3, 0.1)))


def test_a_profile_begins_with_what_was_recorded_and_goes_on_in_the_usual_shape() -> None:
    usual = usual_profile(4, 3)
    profile = SurvivalProfile(4, 3, RECORD)
    assert profile.survival[:2, :2] == pytest.approx(np.array(RECORD.survival))
    assert profile.survival[2:] == pytest.approx(usual[2:] * 0.3 / usual[1, 0])
    assert profile.survival[:2, 2] == pytest.approx(usual[:2, 2] * [0.6, 0.3] / usual[:2, 0])
    # Of a smaller search, what it has of it; a draft moves it as far as any other profile.
    small = SurvivalProfile(1, 1, RECORD)
    assert small.survival == pytest.approx(np.array([[0.6]]))
    small.drafted(np.zeros((STARTING_WEIGHT, 1, 1)))
    assert small.survival == pytest.approx(np.array([[0.3]]))


def test_a_record_of_nodes_that_were_never_accepted_leaves_room_to_learn() -> None:
    profile = SurvivalProfile(2, 2, AcceptanceRecord(0.5, (-9.0,), ((0.0, 0.0),)))
    profile.drafted(np.full((64, 1, 2), 0.8))
    assert np.isfinite(profile.survival).all()
    assert profile.survival[0] == pytest.approx([0.64, 0.64])


def test_an_estimator_begins_with_what_was_recorded_as_firmly_as_it_holds_anything() -> None:
    estimator = AcceptanceEstimator(3, record=RECORD)
    assert estimator.slope.tolist() == pytest.approx([0.9])
    assert estimator.biases.tolist() == pytest.approx([0.3, -0.4, -0.4])
    assert estimator.learned.tolist() == [DAMPING_OBSERVATIONS] * 3
