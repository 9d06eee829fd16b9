# SPDX-License-Identifier: Apache-2.0
"""Two acceptance models: of greedy requests, and of those that sample."""

import numpy as np
import pytest
import torch

from vllm_redrafter.budget.acceptance import MAX_LOG_ODDS, AcceptanceEstimator, RefitSchedule
from vllm_redrafter.drafting.acceptance_model import FIRST_REFIT, LONGEST_REFIT, AcceptanceModel

DEPTHS = 3
NODES = 40


def test_it_learns_of_one_kind_what_the_estimator_of_any_device_learns() -> None:
    random, model = np.random.default_rng(1), AcceptanceModel(DEPTHS)
    greedy = model.slopes[0], *model.biases[0]
    estimator = AcceptanceEstimator(DEPTHS)
    refits = RefitSchedule(FIRST_REFIT, LONGEST_REFIT)
    for _ in range(700):
        log_odds = random.normal(0.0, 3.0, NODES).astype(np.float32)
        log_odds[0] = -MAX_LOG_ODDS
        depths = random.integers(1, DEPTHS, NODES).astype(np.int32)
        accepted = random.random(NODES) < 1.0 / (1.0 + np.exp(1.0 - 0.7 * log_odds))
        model.observe(np.ones(NODES, np.bool_), log_odds, depths, accepted)
        step = map(torch.from_numpy, (log_odds, depths, accepted))
        nodes = dict(zip(("log_odds", "depths", "accepted"), step, strict=True))
        estimator.observe(judged=torch.ones(NODES, dtype=torch.bool), **nodes)
        if refits.due():
            estimator.refit()
    assert model.slopes[1] == pytest.approx(estimator.slope.item(), rel=1e-4)
    assert model.biases[1] == pytest.approx(estimator.biases.numpy(), rel=1e-4)
    assert model.slopes[1] == pytest.approx(0.7, abs=0.1)
    assert (model.slopes[0], *model.biases[0]) == greedy
