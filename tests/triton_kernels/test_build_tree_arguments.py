# SPDX-License-Identifier: Apache-2.0
"""What the kernels that build trees refuse, by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.built_trees import SENTINEL, buffers, on, random_search, roots
from vllm_redrafter.config import LONGEST_PATH, MOST_MATCHES, TOP_TOKENS
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.triton_kernels.build_tree import (
    MAX_CANDIDATES,
    DraftRows,
    NodeLimits,
    ScoredTrees,
    TreeBuffers,
    build_tree,
)


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def transposed(tensor: Tensor) -> Tensor:
    """The same shape, but not contiguous."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


REFUSED: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("root_tokens", Tensor.float),
    ("root_tokens", strided),
    ("root_tokens", meta),
    ("root_tokens", lambda root: root[:1]),
    ("root_tokens", lambda root: root.unsqueeze(1)),
    ("tokens", Tensor.float),
    ("tokens", Tensor.short),
    ("tokens", transposed),
    ("tokens", lambda tokens: tokens[0]),
    ("tokens", lambda tokens: tokens.repeat(1, 1, 200)),
    ("back_pointers", Tensor.float),
    ("back_pointers", transposed),
    ("back_pointers", meta),
    ("back_pointers", lambda pointers: pointers[:1]),
    ("log_probs", Tensor.double),
    ("log_probs", Tensor.half),
    ("log_probs", transposed),
    ("log_probs", meta),
    ("log_probs", lambda log_probs: log_probs[:, :2]),
]


@pytest.mark.parametrize(("name", "spoil"), REFUSED, ids=[name for name, _ in REFUSED])
def test_candidates_that_do_not_fit_are_refused_by_name(
    device: torch.device, name: str, spoil: Callable[[Tensor], Tensor]
) -> None:
    tokens, back_pointers, log_probs = on(device, random_search(2, 3, 4))
    good: dict[str, Any] = {
        "root_tokens": roots(2).to(device),
        "tokens": tokens,
        "back_pointers": back_pointers,
        "log_probs": log_probs,
        "out": buffers(device, 2, 5),
    }
    bad = good | {name: spoil(good[name])}
    if name == "tokens" and bad["tokens"].shape[-1] > 4:
        bad |= {x: bad[x].repeat(1, 1, 200) for x in ("back_pointers", "log_probs")}
    with pytest.raises(ValueError, match=rf"^{name}: "):
        build_tree(**bad)
    assert (good["out"].tokens == SENTINEL).all()


def test_log_odds_that_do_not_fit_are_named(device: torch.device) -> None:
    explored = ExploredNodes(*(torch.zeros(1, 2, 3) for _ in range(3)))
    arguments = (roots(1), explored.tokens.long(), explored.back_pointers.long())
    for log_odds, out, named in (
        (torch.zeros(1, 2, 2), ScoredTrees(1, 4, device), "log_odds"),
        (torch.zeros(1, 2, 3, dtype=torch.float64), ScoredTrees(1, 4, device), "log_odds"),
        (torch.zeros(1, 2, 3), TreeBuffers(1, 4, device), "out: must be ScoredTrees"),
    ):
        with pytest.raises(ValueError, match=named):
            build_tree(
                *(a.to(device) for a in arguments),
                explored.log_probs.to(device),
                out=out,
                log_odds=log_odds.to(device),
            )


def test_the_widest_search_and_all_paths_are_not_too_many() -> None:
    assert LONGEST_PATH * (TOP_TOKENS + MOST_MATCHES) <= MAX_CANDIDATES


def test_lengths_of_matches_that_do_not_fit_are_named() -> None:
    tokens = torch.zeros(1, 2, 3).long()
    for match_lengths, out, named in (
        (tokens, ScoredTrees(1, 4, "cpu"), "match_lengths"),
        (tokens.int(), TreeBuffers(1, 4, "cpu"), "out: must be ScoredTrees where match_lengths"),
    ):
        arguments = roots(1), tokens, tokens, tokens.float()
        with pytest.raises(ValueError, match=named):
            build_tree(*arguments, out=out, match_lengths=match_lengths)


def test_wishes_and_rows_that_do_not_fit_are_named(device: torch.device) -> None:
    explored = ExploredNodes(*(torch.zeros(2, 2, 3) for _ in range(3)))
    arguments = (roots(2), explored.tokens.long(), explored.back_pointers.long())
    numbers = torch.zeros(2, dtype=torch.int32)
    tokens, probs = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4)
    node_limits = NodeLimits(numbers, numbers)
    for changed, named in (
        ({"node_limits": NodeLimits(numbers.bool(), numbers)}, "node_limits.chains"),
        ({"node_limits": NodeLimits(numbers, numbers[:1])}, "node_limits.limits"),
        ({"rows": DraftRows(tokens[:, :3], None)}, "rows.tokens"),
        ({"rows": DraftRows(tokens, probs), "node_limits": node_limits}, "rows.probs: need"),
        (
            {
                "rows": DraftRows(tokens, probs[:1]),
                "node_limits": node_limits,
                "log_odds": explored.log_probs,
            },
            "rows.probs: must",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            build_tree(*arguments, explored.log_probs, ScoredTrees(2, 4, "cpu"), **changed)


def test_entries_that_do_not_fit_are_named(device: torch.device) -> None:
    tokens = torch.zeros(2, 1, 1, dtype=torch.int64, device=device)
    arguments = (roots(2).to(device), tokens, tokens, tokens.float())
    for entries, message in (
        (torch.zeros(2, device=device), "entries: expected int32 or int64"),
        (torch.zeros(1, dtype=torch.int64, device=device), r"entries: expected \[2\], got \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            build_tree(*arguments, out=TreeBuffers(2, 1, device), entries=entries)


@pytest.mark.parametrize("max_requests", [1, 2])
def test_buffers_too_small_or_elsewhere_are_refused(
    device: torch.device, max_requests: int
) -> None:
    out = TreeBuffers(max_requests, 5, "meta" if max_requests == 2 else device)
    inputs = on(device, random_search(2, 3, 4))
    with pytest.raises(ValueError, match=r"\bout\b"):
        build_tree(roots(2).to(device), *inputs, out)


@pytest.mark.parametrize("max_nodes", [0, 128, -1])
def test_buffers_hold_1_to_127_nodes(device: torch.device, max_nodes: int) -> None:
    with pytest.raises(ValueError, match=r"^max_nodes must be 1 to 127"):
        TreeBuffers(2, max_nodes, device)
