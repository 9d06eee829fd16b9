# SPDX-License-Identifier: Apache-2.0
"""What is learned of a step's nodes is what the host's models learn."""

import numpy as np
import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu import torch_drafting
from redrafter_testing.gpu.torch_drafting import judged_and_accepted
from vllm_redrafter.budget.match_acceptance import PRIOR_WEIGHT, prior_acceptance
from vllm_redrafter.drafting.acceptance_model import MatchAcceptance
from vllm_redrafter.tree.context_matches import LENGTH_CLASSES, LONGEST_MATCH, MATCH_CLASSES
from vllm_redrafter.triton_kernels import observe_matches as matches_kernel
from vllm_redrafter.triton_kernels import observe_nodes as nodes_kernel
from vllm_redrafter.triton_kernels.observe_matches import observe_matches
from vllm_redrafter.triton_kernels.observe_nodes import COLUMNS, VerifiedTrees, observe_nodes

DEPTHS = 4
"""Levels of a tree at most."""
DEPTH = 3
"""Of paths; the trees have deeper nodes."""


def random_step(
    requests: int, slots: int, device: torch.device, seed: int = 0
) -> tuple[VerifiedTrees, Tensor, Tensor]:
    """Trees of which paths were walked: (trees, entries, log_odds); every other request samples."""
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
    num_verified, temperatures = random(slots + 1, requests), 0.7 * (torch.arange(requests) % 2)
    trees = VerifiedTrees(tokens, parents, depths, num_verified, path, temperatures)
    log_odds = 8 * torch.randn(requests + 2, slots, generator=generator)
    log_odds[0, 1] = torch.nan
    entries = torch.arange(requests).flip(0) + 1
    return VerifiedTrees(*(t.to(device) for t in trees)), entries.to(device), log_odds.to(device)


@pytest.mark.parametrize(("requests", "slots"), [(1, 2), (3, 13)])
def test_statistics_are_the_estimator_s(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, requests: int, slots: int
) -> None:
    """Two steps, so that they are added up; more requests than are added at a time."""
    monkeypatch.setattr(nodes_kernel, "TILE", 2)
    slopes = torch.tensor([[0.5], [0.9]], device=device)
    biases = torch.tensor([[0.5, -0.2, 0.1, -1.0], [0.1, 0.3, -1.2, 0.6]], device=device)
    statistics, expected = torch.zeros(2, 2, DEPTHS, COLUMNS, device=device)
    sums = torch.full((requests + 1, DEPTHS, COLUMNS), torch.nan, device=device)
    for seed in range(2):
        trees, entries, log_odds = random_step(requests, slots, device, seed)
        log_odds[:, 2::5] = -torch.inf  # nodes that the drafter did not find
        given = entries, log_odds, trees, slopes, biases, sums
        observe_nodes(*given, statistics)
        torch_drafting.observe_nodes(*given, expected)
    torch.testing.assert_close(statistics, expected, rtol=1e-4, atol=1e-4)
    assert sums[requests:].isnan().all(), "another request's is written"
    if requests > 1:
        assert (statistics[:, :, 5].sum(1) > 5).all(), "hardly anything was judged"


@pytest.mark.parametrize(("requests", "slots", "steps"), [(1, 5, 6), (7, 13, 8)])
def test_probabilities_are_those_of_the_cpu_engine(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, requests: int, slots: int, steps: int
) -> None:
    """More requests than a program looks at, at a time; memory that is soon full."""
    monkeypatch.setattr(matches_kernel, "NODES", 32)
    memory = 12.0
    monkeypatch.setattr("vllm_redrafter.drafting.acceptance_model.MEMORY", memory)
    reference = MatchAcceptance(DEPTH)
    prior = torch.tensor(prior_acceptance(DEPTH)).float().expand(2, -1, -1).contiguous()
    probabilities, judged = prior.to(device), torch.full_like(prior, PRIOR_WEIGHT)
    counts = torch.stack([judged, PRIOR_WEIGHT * prior], dim=-1).to(device)
    observed, totals = 0, torch.zeros(4, dtype=torch.int64, device=device)
    expected = torch.zeros(2, 2, dtype=torch.int64)
    for seed in range(steps):
        trees, entries, _ = random_step(requests, slots, device, seed)
        # About half of the nodes are on no path.
        sizes, generator = (requests + 2, slots), torch.Generator().manual_seed(seed)
        drawn = torch.randint(-MATCH_CLASSES, MATCH_CLASSES + 1, sizes, generator=generator)
        match_classes = drawn.clamp(min=0).int()
        given = entries, match_classes.to(device), trees, memory, counts, probabilities
        observe_matches(*given, totals)
        judged, accepted = (part.cpu() for part in judged_and_accepted(trees, len(entries)))
        depths, own = trees.depths.cpu(), match_classes[entries.cpu()]
        node, num_verified = torch.arange(slots), trees.num_verified.cpu()[:, None]
        on_path = (own > 0) & (depths <= DEPTH)
        is_verified = on_path & (node > 0) & (node < num_verified)
        judged &= on_path
        for nodes, count in ((is_verified, expected[:, 0]), (judged & accepted, expected[:, 1])):
            of_earlier = (own[nodes] - 1) % LENGTH_CLASSES >= LONGEST_MATCH
            count += torch.bincount(of_earlier.long(), minlength=2)
        request, _ = judged.nonzero(as_tuple=True)
        reference.observe(
            (trees.temperatures.cpu() > 0)[request].numpy(),
            own[judged].long().numpy(),
            depths[judged].numpy(),
            accepted[judged].numpy(),
        )
        observed += len(request)
    assert observed > steps // 2
    assert totals.tolist() == expected.flatten().tolist(), "of own text, then of earlier answers"
    found = probabilities.cpu().numpy()
    np.testing.assert_allclose(found, reference.probabilities, rtol=1e-4, atol=1e-6)
    assert counts[..., 0].max() <= memory * (1 + 1e-6)
    if requests > 1:
        assert not np.allclose(found[0], found[1]), "greedy and sampled requests were mixed"
