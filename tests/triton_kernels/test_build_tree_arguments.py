# SPDX-License-Identifier: Apache-2.0
"""What the kernels that build trees refuse, by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import strided
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


def transposed(tensor: Tensor) -> Tensor:
    """The same shape, but not contiguous."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


REFUSED: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    *((name, Tensor.short) for name in ("root_tokens", "tokens", "back_pointers", "log_probs")),
    *((name, transposed) for name in ("tokens", "back_pointers", "log_probs")),
    *((name, lambda x: x.to("meta")) for name in ("root_tokens", "back_pointers", "log_probs")),
    *((name, lambda tensor: tensor[:1]) for name in ("root_tokens", "back_pointers", "log_probs")),
    ("root_tokens", strided),
    ("root_tokens", lambda root: root.unsqueeze(1)),
    ("tokens", lambda tokens: tokens[0]),
    ("tokens", lambda tokens: tokens.repeat(1, 1, 200)),
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


def test_the_widest_search_and_all_paths_are_not_too_many() -> None:
    assert LONGEST_PATH * (TOP_TOKENS + MOST_MATCHES) <= MAX_CANDIDATES


def test_wishes_and_rows_that_do_not_fit_are_named(device: torch.device) -> None:
    explored = ExploredNodes(*(torch.zeros(2, 2, 3) for _ in range(3)))
    arguments = (roots(2), explored.tokens.long(), explored.back_pointers.long())
    numbers = torch.zeros(2, dtype=torch.int32)
    tokens, probs = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4)
    node_limits = NodeLimits(numbers, numbers)
    wide, entries = torch.zeros(2, 2, 3), torch.zeros(2, dtype=torch.int64)
    for changed, named in (
        ({"log_odds": wide[..., :2]}, "log_odds"),
        ({"match_lengths": wide.long()}, "match_lengths"),
        ({"entries": entries.float()}, "entries: expected int32 or int64"),
        ({"entries": entries[:1]}, r"entries: expected \[2\], got \[1\]"),
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
