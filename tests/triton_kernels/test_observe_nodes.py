# SPDX-License-Identifier: Apache-2.0
"""What is learned of a step's nodes is what the estimator itself would add up."""

from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.verified_trees import DEPTHS, judged_and_accepted, random_step
from vllm_redrafter.budget.acceptance import AcceptanceEstimator
from vllm_redrafter.triton_kernels import observe_nodes as kernel
from vllm_redrafter.triton_kernels.observe_nodes import COLUMNS, VerifiedTrees, observe_nodes


def expected_statistics(
    estimator: AcceptanceEstimator, trees: VerifiedTrees, entries: Tensor, log_odds: Tensor
) -> Tensor:
    """The estimator's own sums; nodes that are on a path alone left out."""
    judged, accepted = judged_and_accepted(trees)
    own = log_odds[entries].cpu()
    estimator.observe(own, trees.depths.cpu(), judged & (own != -torch.inf), accepted)
    return estimator.statistics


@pytest.mark.parametrize(("requests", "slots"), [(1, 2), (3, 13)])
def test_statistics_are_the_estimator_s(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, requests: int, slots: int
) -> None:
    """Two steps, so that they are added up; more requests than are added at a time."""
    monkeypatch.setattr(kernel, "TILE", 2)
    reference = AcceptanceEstimator(DEPTHS)
    reference.biases.copy_(torch.tensor([0.5, -0.2, 0.1, -1.0]))
    slope, biases = reference.slope.to(device), reference.biases.to(device)
    statistics = torch.zeros(DEPTHS, COLUMNS, device=device)
    sums = torch.full((requests + 1, DEPTHS, COLUMNS), torch.nan, device=device)
    for seed in range(2):
        trees, entries, log_odds = random_step(requests, slots, device, seed)
        log_odds[:, 2::5] = -torch.inf  # nodes that the drafter did not find
        observe_nodes(entries, log_odds, trees, slope, biases, sums, statistics)
        expected = expected_statistics(reference, trees, entries, log_odds)
    torch.testing.assert_close(statistics.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert sums[requests:].isnan().all(), "another request's is written"
    if requests > 1:
        assert statistics[:, 5].sum() > 5, "hardly anything was judged"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"entries": torch.zeros(2)}, "entries: must"),
        ({"entries": torch.zeros(3, dtype=torch.int64)}, "entries: 3 requests"),
        ({"log_odds": torch.zeros(4, 5).double()}, "log_odds"),
        ({"sums": torch.zeros(2, 3)}, "sums"),
        ({"statistics": torch.zeros(3)}, "statistics"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], named: str) -> None:
    trees, entries, log_odds = random_step(2, 5, torch.device("cpu"))
    arguments = {
        "entries": entries,
        "log_odds": log_odds,
        "trees": trees,
        "slope": torch.zeros(1),
        "biases": torch.zeros(DEPTHS),
        "sums": torch.zeros(2, DEPTHS, COLUMNS),
        "statistics": torch.zeros(DEPTHS, COLUMNS),
    }
    with pytest.raises(ValueError, match=named):
        observe_nodes(**(arguments | changed))
