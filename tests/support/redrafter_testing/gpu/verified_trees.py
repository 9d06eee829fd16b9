# SPDX-License-Identifier: Apache-2.0
"""A step's trees and what was walked of them, at random, and what that says of their nodes."""

import torch
from torch import Tensor

from vllm_redrafter.triton_kernels.observe_nodes import VerifiedTrees

DEPTHS = 4
"""Levels of a tree at most."""


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


def judged_and_accepted(trees: VerifiedTrees) -> tuple[Tensor, Tensor]:
    """[R, K+1] bool each, on the CPU: by loops over the nodes."""
    judged, accepted = torch.zeros(2, *trees.tokens.shape, dtype=torch.bool)
    for request, path in enumerate(trees.path.tolist()):
        for node, (parent, token) in enumerate(
            zip(trees.parents[request].tolist(), trees.tokens[request].tolist(), strict=True)
        ):
            accepted[request, node] = node in path
            within = 0 < node < trees.num_verified[request]
            judged[request, node] = within and token >= 0 and parent in path
    return judged, accepted
