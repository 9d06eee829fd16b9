# SPDX-License-Identifier: Apache-2.0
"""The grid of a search's nodes and of paths is the reference's, node by node."""

import pytest
import torch

from redrafter_testing.algorithm.context_matches import search_and_paths
from redrafter_testing.gpu import torch_drafting
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import MATCH_CLASSES, ContextMatches
from vllm_redrafter.triton_kernels.find_matches import MatchBuffers
from vllm_redrafter.triton_kernels.join_matches import JoinedBuffers, SearchedNodes, join_matches

REQUESTS, GARBAGE = 4, -77


def assert_joined(
    explored: ExploredNodes, matches: ContextMatches, device: torch.device, scored: bool = True
) -> None:
    """Every other request samples, with other probabilities. Log-odds go along where `scored`."""
    length, width = explored.tokens.shape[1:]
    num_paths, depth = matches.tokens.shape[1:]
    paths = MatchBuffers(REQUESTS, num_paths, depth, 8, device)
    paths.tokens.copy_(matches.tokens)
    paths.classes.copy_(matches.classes)
    parts = explored.tokens, explored.back_pointers, explored.log_probs
    log_odds = torch.rand(explored.log_probs.shape).to(device) if scored else None
    search = SearchedNodes(*(part.to(device).contiguous() for part in parts), log_odds)
    generator = torch.Generator().manual_seed(3)
    probabilities = torch.rand(2, MATCH_CLASSES, depth, generator=generator).to(device)
    temperatures = torch.tensor([0.0, 0.7] * (REQUESTS // 2), device=device)
    made = []
    for join in (join_matches, torch_drafting.join_matches):
        out = JoinedBuffers(REQUESTS + 1, (width, length), (num_paths, depth), device)
        for buffer in vars(out).values():
            buffer.fill_(GARBAGE)
        join(search, paths, probabilities, temperatures, out)
        made.append(vars(out))
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "given", [*((seed,) for seed in range(6)), (0, 5, 1, 4, 2), (0, 1, 4, 1, 8), (0, 6, 17, 3, 6)]
)
def test_nodes_of_both_are_joined_as_by_the_reference(
    given: tuple[int, ...], device: torch.device
) -> None:
    """Either may be the deeper one, or the wider one."""
    assert_joined(*search_and_paths(*given), device)


def test_paths_without_a_search_are_the_whole_grid(device: torch.device) -> None:
    _, matches = search_and_paths(1)
    none = torch.zeros(REQUESTS, 0, 0)
    assert_joined(ExploredNodes(none.long(), none.long(), none), matches, device)


def test_log_odds_are_left_alone_where_nobody_asks(device: torch.device) -> None:
    assert_joined(*search_and_paths(0), device, scored=False)
