# SPDX-License-Identifier: Apache-2.0
"""The walk on the device is that of torch, and writes its path alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import (
    GARBAGE,
    bushy,
    chain,
    grown_tree,
    poisoned,
    star,
    strided,
    token_trees,
)
from vllm_redrafter.tree.acceptance import accept_path as torch_accept_path
from vllm_redrafter.triton_kernels.accept_path import accept_path

SENTINEL = -77
OUTPUTS = ("output_tokens", "num_sampled", "path", "last_row")


@dataclass(frozen=True)
class Walk:
    """One request: its nodes, and what the target sampled at them."""

    tokens: list[int]
    parents: list[int]
    sampled: list[int]

    @classmethod
    def to(cls, node: int, parents: list[int]) -> Walk:
        """Nodes carry their index, and the target goes to this node and then elsewhere."""
        sampled = [GARBAGE] * len(parents)
        sampled[node] = 5000 + node
        while node:
            sampled[parents[node]] = node
            node = parents[node]
        return cls([9000, *range(1, len(parents))], parents, sampled)


def arguments(
    device: torch.device,
    walks: Sequence[Walk],
    slots: int,
    *,
    dtype: torch.dtype = torch.int64,
    wider: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """What `accept_path` takes: garbage where no node is, sentinels where it writes.

    Rows stand apart and in reverse order; outputs have 2 requests and `wider` columns more.
    """
    tree = token_trees([w.parents for w in walks], slots, [w.tokens for w in walks])
    sampled, row_start = [GARBAGE], [0] * len(walks)
    for request, walk in reversed(list(enumerate(walks))):
        row_start[request] = len(sampled)
        sampled += [*walk.sampled, GARBAGE, -1]

    def out(*size: int) -> Tensor:
        return torch.full(size, SENTINEL, dtype=torch.int32)

    room = len(walks) + 2
    values: dict[str, Tensor] = {
        "tokens": poisoned(tree.tokens, tree),
        "parents": poisoned(tree.parents, tree),
        "depths": poisoned(tree.depths, tree),
        "ancestors": poisoned(tree.ancestors, tree),
        "num_nodes": tree.num_nodes,
        "sampled": torch.tensor(sampled, dtype=dtype),
        "row_start": torch.tensor(row_start, dtype=torch.int32),
        "output_tokens": out(room, slots + wider[0]),
        "num_sampled": out(room),
        "path": out(room, slots + wider[1]),
        "last_row": out(room),
    }
    return {name: value.to(device) for name, value in values.items()}


def check(device: torch.device, walks: Sequence[Walk], slots: int, **options: Any) -> None:
    """The kernel's outputs are those of the torch walk, and nothing else is written."""
    call = arguments(device, walks, slots, **options)
    accept_path(**call)
    out = {name: call[name].cpu() for name in OUTPUTS}

    tree = token_trees([w.parents for w in walks], slots, [w.tokens for w in walks])
    sampled = torch.zeros(len(walks), slots, dtype=torch.int64)
    for request, walk in enumerate(walks):
        sampled[request, : len(walk.sampled)] = torch.tensor(walk.sampled)
    scored = torch_accept_path(tree, sampled)

    requests = len(walks)
    for name, expected in (("output_tokens", scored.output_tokens), ("path", scored.path.int())):
        assert torch.equal(out[name][:requests, :slots], expected)
        assert (out[name][:requests, slots:] == -1).all()
    assert torch.equal(out["num_sampled"][:requests], scored.num_sampled)
    assert torch.equal(out["last_row"][:requests] - call["row_start"].cpu(), scored.last_node)
    for name in OUTPUTS:
        assert (out[name][requests:] == SENTINEL).all(), f"{name}: another request's is written"


@st.composite
def some_walks(draw: st.DrawFn) -> Walk:
    """Siblings differ; what is sampled is often a child's token."""
    draws = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2)), max_size=20)
    tokens, parents = grown_tree(draw(draws), root=100)
    sampled = draw(st.lists(st.integers(-1, 3), min_size=len(tokens), max_size=len(tokens)))
    return Walk(tokens, parents, sampled)


@settings(deadline=None, max_examples=30)
@given(
    walks=st.lists(some_walks(), min_size=1, max_size=4),
    slots=st.sampled_from([21, 33]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    wider=st.sampled_from([(0, 0), (3, 12)]),
)
def test_the_path_is_the_reference_s(
    device: torch.device,
    walks: list[Walk],
    slots: int,
    dtype: torch.dtype,
    wider: tuple[int, int],
) -> None:
    check(device, walks, slots, dtype=dtype, wider=wider)


@pytest.mark.parametrize("shape", [chain, star, bushy])
@pytest.mark.parametrize("slots", [1, 5, 33, 128])
def test_every_bit_of_every_word_counts(
    device: torch.device, shape: Callable[[int], list[int]], slots: int
) -> None:
    """Bit 31 is an int32's sign; at each word's ends one of the requests stops."""
    ends = [word + node for word in range(0, 128, 32) for node in (0, 1, 30, 31)]
    check(device, [Walk.to(min(node, slots - 1), shape(slots)) for node in ends], slots)


INTEGERS = (
    *("tokens", "parents", "depths", "ancestors", "num_nodes", "row_start"),
    *("output_tokens", "num_sampled", "path", "last_row"),
)
REFUSED: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    *((name, Tensor.long) for name in INTEGERS),
    *((name, strided) for name in (*INTEGERS, "sampled")),
    *((name, lambda tensor: tensor.to("meta")) for name in (*INTEGERS[1:], "sampled")),
    *((name, lambda tensor: tensor[:1]) for name in INTEGERS if name != "num_nodes"),
    *((name, lambda tensor: tensor[:, :8]) for name in ("parents", "output_tokens", "path")),
    ("ancestors", lambda bits: bits[..., :1]),
    ("sampled", Tensor.float),
    ("sampled", lambda sampled: sampled.unsqueeze(1)),
]


@pytest.fixture(scope="module")
def good_arguments(device: torch.device) -> dict[str, Any]:
    call = arguments(device, [Walk.to(3, chain(40)), Walk.to(39, bushy(40))], 40)
    for name in ("output_tokens", "num_sampled", "path", "last_row"):
        call[name] = call[name][:2]
    accept_path(**call)
    return call


@pytest.mark.parametrize(("name", "spoil"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_does_not_fit_is_refused_by_name(
    good_arguments: dict[str, Any], name: str, spoil: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        accept_path(**good_arguments | {name: spoil(good_arguments[name])})


def test_more_than_128_nodes_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^tokens: at most 128 nodes, got 129"):
        accept_path(**arguments(device, [Walk.to(3, chain(129))], 129))
