# SPDX-License-Identifier: Apache-2.0
"""The grid of a search's nodes and of paths is the reference's, node by node."""

from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.algorithm.context_matches import search_and_paths
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import MATCH_CLASSES, ContextMatches, joined, joint_scores
from vllm_redrafter.triton_kernels.find_matches import MatchBuffers
from vllm_redrafter.triton_kernels.join_matches import JoinedBuffers, SearchedNodes, join_matches

REQUESTS, GARBAGE = 4, -77


def probabilities(depth: int, device: torch.device) -> Tensor:
    """Of greedy and of sampled requests: different ones."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(2, MATCH_CLASSES, depth, generator=generator).to(device)


def join(
    explored: ExploredNodes,
    matches: ContextMatches,
    device: torch.device,
    log_odds: Tensor | None = None,
) -> JoinedBuffers:
    """Every other request samples."""
    length, width = explored.tokens.shape[1:]
    num_paths, depth = matches.tokens.shape[1:]
    paths = MatchBuffers(REQUESTS, num_paths, depth, 8, device)
    paths.tokens.copy_(matches.tokens)
    paths.classes.copy_(matches.classes)
    out = JoinedBuffers(REQUESTS + 1, (width, length), (num_paths, depth), device)
    for buffer in vars(out).values():
        buffer.fill_(GARBAGE)
    found = (explored.tokens, explored.back_pointers, explored.log_probs)
    search = SearchedNodes(
        *(part.to(device).contiguous() for part in found),
        None if log_odds is None else log_odds.to(device),
    )
    temperatures = torch.tensor([0.0, 0.7] * (REQUESTS // 2), device=device)
    join_matches(search, paths, probabilities(depth, device), temperatures, out)
    assert all((buffer[REQUESTS:] == GARBAGE).all() for buffer in vars(out).values())
    return out


def assert_joined(explored: ExploredNodes, matches: ContextMatches, device: torch.device) -> None:
    log_odds = torch.rand(explored.log_probs.shape)
    out = join(explored, matches, device, log_odds)
    nodes, match_classes = joined(explored, matches)
    for found, expected in (
        (out.tokens, nodes.tokens),
        (out.back_pointers, nodes.back_pointers),
        (out.match_classes, match_classes),
    ):
        assert found[:REQUESTS].tolist() == expected.tolist()
    by_kind = probabilities(matches.tokens.shape[2], torch.device("cpu"))
    by_request = by_kind[torch.arange(REQUESTS) % 2]
    scores = joint_scores(nodes, match_classes, by_request)
    torch.testing.assert_close(out.scores[:REQUESTS].cpu(), scores, rtol=1e-5, atol=1e-5)
    length, width = explored.tokens.shape[1:]
    assert torch.equal(out.log_odds[:REQUESTS, :length, :width].cpu(), log_odds)
    out.log_odds[:REQUESTS, :length, :width] = -torch.inf
    assert (out.log_odds[:REQUESTS] == -torch.inf).all()


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
    out = join(*search_and_paths(0), device)
    assert (out.log_odds == GARBAGE).all()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"probabilities": torch.zeros(2, 5, 4)}, "probabilities"),
        ({"paths": MatchBuffers(3, 2, 5, 8, "cpu")}, "search: 4 requests"),
        ({"out": JoinedBuffers(4, (3, 3), (1, 5), "cpu")}, "out: expected a grid"),
        ({"search": SearchedNodes(*torch.zeros(3, 4, 3, 3), None)}, "tokens: expected"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], named: str) -> None:
    explored, _ = search_and_paths(0)
    arguments = {
        "search": SearchedNodes(explored.tokens, explored.back_pointers, explored.log_probs, None),
        "paths": MatchBuffers(4, 2, 5, 8, "cpu"),
        "probabilities": torch.zeros(2, 5, 5),
        "temperatures": torch.zeros(4),
        "out": JoinedBuffers(4, (3, 3), (2, 5), "cpu"),
    }
    with pytest.raises(ValueError, match=named):
        join_matches(**(arguments | changed))
