"""What is learned of a step's nodes is what the estimator itself would add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_redrafter.budget.acceptance import AcceptanceEstimator
from vllm_redrafter.triton_kernels import observe_nodes as kernel
from vllm_redrafter.triton_kernels.observe_nodes import COLUMNS, VerifiedTrees, observe_nodes

DEPTHS = 4


def random_step(
    requests: int, slots: int, device: torch.device, seed: int = 0
) -> tuple[VerifiedTrees, Tensor, Tensor]:
    """Random trees of which paths from the root were walked: (trees, entries, log_odds)."""
    generator = torch.Generator().manual_seed(seed)

    def random(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator).int()

    parents, depths = torch.zeros(2, requests, slots, dtype=torch.int32)
    path = torch.full((requests, slots), -1, dtype=torch.int32)
    for request in range(requests):
        for node in range(1, slots):
            above = int(random(node, 1))
            if depths[request, above] == DEPTHS:
                above = 0
            parents[request, node] = above
            depths[request, node] = depths[request, above] + 1
        last = int(random(slots, 1))
        walked = [last]
        while walked[-1]:
            walked.append(int(parents[request, walked[-1]]))
        path[request, : len(walked)] = torch.tensor(walked[::-1])
    tokens = random(10, requests, slots) - 1
    trees = VerifiedTrees(tokens, parents, depths, random(slots + 1, requests), path)
    log_odds = 8 * torch.randn(requests + 2, slots, generator=generator)
    log_odds[0, 1] = torch.nan
    entries = torch.arange(requests).flip(0) + 1
    return VerifiedTrees(*(t.to(device) for t in trees)), entries.to(device), log_odds.to(device)


def expected_statistics(
    estimator: AcceptanceEstimator, trees: VerifiedTrees, entries: Tensor, log_odds: Tensor
) -> Tensor:
    """By loops over the nodes, and the estimator's own sums."""
    judged, accepted = torch.zeros(2, *trees.tokens.shape, dtype=torch.bool)
    for request, path in enumerate(trees.path.tolist()):
        for node, (parent, token) in enumerate(
            zip(trees.parents[request].tolist(), trees.tokens[request].tolist(), strict=True)
        ):
            accepted[request, node] = node in path
            within = 0 < node < trees.num_verified[request]
            judged[request, node] = within and token >= 0 and parent in path
    estimator.observe(log_odds[entries].cpu(), trees.depths.cpu(), judged, accepted)
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
        observe_nodes(entries, log_odds, trees, slope, biases, sums, statistics)
        expected = expected_statistics(reference, trees, entries, log_odds)
    torch.testing.assert_close(statistics.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert sums[requests:].isnan().all(), "another request's is written"
    if requests > 1:
        assert statistics[:, 5].sum() > 5, "hardly anything was judged"


def test_what_was_not_verified_teaches_nothing(device: torch.device) -> None:
    trees, entries, log_odds = random_step(2, 5, device)
    statistics = torch.ones(DEPTHS, COLUMNS, device=device)
    sums = torch.full((2, DEPTHS, COLUMNS), torch.nan, device=device)
    nothing = trees._replace(num_verified=torch.zeros_like(trees.num_verified))
    estimator = AcceptanceEstimator(DEPTHS, device)
    observe_nodes(entries, log_odds, nothing, estimator.slope, estimator.biases, sums, statistics)
    assert (statistics == 1).all()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"entries": torch.zeros(2)}, "entries: must"),
        ({"entries": torch.zeros(3, dtype=torch.int64)}, "entries: 3 requests"),
        ({"log_odds": torch.zeros(4, 5).double()}, "log_odds"),
        ({"slope": torch.zeros(2)}, "slope"),
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
