# SPDX-License-Identifier: Apache-2.0
"""What is learned of nodes on paths is what the CPU engine's `MatchAcceptance` learns."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.verified_trees import judged_and_accepted, random_step
from vllm_redrafter.budget.match_acceptance import (
    MEMORY,
    PRIOR_WEIGHT,
    prior_acceptance,
)
from vllm_redrafter.drafting.match_acceptance import MatchAcceptance
from vllm_redrafter.tree.context_matches import LONGEST_MATCH
from vllm_redrafter.triton_kernels import observe_matches as kernel
from vllm_redrafter.triton_kernels.observe_matches import observe_matches

DEPTH = 3
"""Of paths; the trees have deeper nodes."""


def prior(device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts and probabilities."""
    probabilities = torch.tensor(prior_acceptance(DEPTH)).float().expand(2, -1, -1).contiguous()
    judged = torch.full_like(probabilities, PRIOR_WEIGHT)
    counts = torch.stack([judged, PRIOR_WEIGHT * probabilities], dim=-1)
    return counts.to(device), probabilities.to(device)


def lengths_of(entries: int, slots: int, seed: int) -> Tensor:
    """About half of the nodes are on no path."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(
        -LONGEST_MATCH, LONGEST_MATCH + 1, (entries, slots), generator=generator
    )
    return lengths.clamp(min=0).int()


@pytest.mark.parametrize(("requests", "slots", "steps"), [(1, 5, 6), (7, 13, 8)])
def test_probabilities_are_those_of_the_cpu_engine(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, requests: int, slots: int, steps: int
) -> None:
    """More requests than a program looks at, at a time; memory that is soon full."""
    monkeypatch.setattr(kernel, "NODES", 32)
    memory = 12.0
    monkeypatch.setattr("vllm_redrafter.drafting.match_acceptance.MEMORY", memory)
    reference = MatchAcceptance(DEPTH)
    counts, probabilities = prior(device)
    temperatures = torch.tensor([0.0, 0.8, 0.0, 1.0, 1.0, 0.0, 0.3])[:requests]
    observed = 0
    for seed in range(steps):
        trees, entries, _ = random_step(requests, slots, device, seed)
        match_lengths = lengths_of(requests + 2, slots, seed)
        observe_matches(
            entries,
            match_lengths.to(device),
            trees,
            temperatures.to(device),
            memory,
            counts,
            probabilities,
        )
        judged, accepted = judged_and_accepted(trees)
        depths, own = trees.depths.cpu(), match_lengths[entries.cpu()]
        judged &= (own > 0) & (depths <= DEPTH)
        request, _ = judged.nonzero(as_tuple=True)
        reference.observe(
            (temperatures > 0)[request].numpy(),
            own[judged].long().numpy(),
            depths[judged].numpy(),
            accepted[judged].numpy(),
        )
        observed += len(request)
    assert observed > steps // 2
    found = probabilities.cpu().numpy()
    np.testing.assert_allclose(found, reference.probabilities, rtol=1e-4, atol=1e-6)
    assert counts[..., 0].max() <= memory * (1 + 1e-6)
    if requests > 1:
        assert not np.allclose(found[0], found[1]), "greedy and sampled requests were mixed"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"entries": torch.zeros(2)}, "entries: must"),
        ({"entries": torch.zeros(3, dtype=torch.int64)}, "entries: 3 requests"),
        ({"temperatures": torch.zeros(3)}, "temperatures"),
        (
            {"counts": torch.zeros(2, 5, 5, 2), "probabilities": torch.zeros(2, 5, 5)},
            "probabilities: of 5 depths",
        ),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], named: str) -> None:
    trees, entries, _ = random_step(2, 5, torch.device("cpu"))
    counts, probabilities = prior(torch.device("cpu"))
    arguments = {
        "entries": entries,
        "match_lengths": torch.zeros(4, 5).int(),
        "trees": trees,
        "temperatures": torch.zeros(2),
        "memory": MEMORY,
        "counts": counts,
        "probabilities": probabilities,
    }
    with pytest.raises(ValueError, match=named):
        observe_matches(**(arguments | changed))
