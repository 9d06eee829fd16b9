# SPDX-License-Identifier: Apache-2.0
"""The walk on the device is that of torch, and writes its path alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm import tree_batches
from vllm_redrafter.tree.acceptance import accept_path as torch_accept_path
from vllm_redrafter.triton_kernels.accept_path import AcceptedPaths, SampledRows, accept_path
from vllm_redrafter.triton_kernels.build_tree import TreeBuffers

SENTINEL = -77
READING = 3
"""The prompt of every third request goes on."""


@dataclass(frozen=True)
class Walk:
    """One request: its nodes, and what the target sampled at them."""

    tokens: list[int]
    parents: list[int]
    sampled: list[int]

    @classmethod
    def to(cls, node: int, parents: list[int]) -> Self:
        """Nodes carry their index, and the target goes to this node and then elsewhere."""
        sampled = [tree_batches.GARBAGE] * len(parents)
        sampled[node] = 5000 + node
        while node:
            sampled[parents[node]] = node
            node = parents[node]
        return cls([9000, *range(1, len(parents))], parents, sampled)


def arguments(device: torch.device, walks: Sequence[Walk], slots: int) -> dict[str, Any]:
    """What `accept_path` takes: garbage where no node is, sentinels where it writes.

    Requests have more rows than nodes, and slots in reverse order; rows stand in the step in
    reverse order; buffers have 2 requests more.
    """
    requests, room = len(walks), len(walks) + 2
    tree = tree_batches.token_trees([w.parents for w in walks], slots, [w.tokens for w in walks])
    trees = TreeBuffers(room, slots - 1, device)
    for name in ("tokens", "parents", "depths", "ancestors"):
        poisoned = tree_batches.poisoned(getattr(tree, name), tree)
        getattr(trees, name)[:requests] = poisoned.to(device)
    trees.num_nodes[:requests] = tree.num_nodes.to(device)
    sampled: list[int] = []
    starts = [0]
    for walk in walks:
        sampled += [*walk.sampled, tree_batches.GARBAGE, -1]
        starts.append(len(sampled))
    lengths = torch.arange(requests, dtype=torch.int32)
    goes_on = (torch.arange(requests) % READING == READING - 1).int()
    rows = SampledRows(
        torch.tensor(starts, dtype=torch.int32),
        torch.arange(len(sampled)).flip(0),
        lengths,
        torch.arange(requests).flip(0),
        (lengths + goes_on).flip(0),
    )

    def out(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(size, SENTINEL, dtype=dtype, device=device)

    paths = AcceptedPaths(
        *(out(room, slots), out(room), out(room), out(room, slots)),
        last_rows=out(room, dtype=torch.int64),
        counts=torch.zeros(3, dtype=torch.int64, device=device),
    )
    return {
        "trees": trees,
        "rows": SampledRows(*(part.to(device) for part in rows)),
        "sampled": torch.tensor(sampled).to(device),
        "out": paths,
        "requests": slice(0, requests),
    }


def check(device: torch.device, walks: Sequence[Walk], slots: int) -> None:
    """In two parts, outputs are those of the torch walk, and nothing else is written."""
    call = arguments(device, walks, slots)
    sampled, starts = call["sampled"], call["rows"].cu_num_logits.tolist()
    middle = starts[len(walks) // 2]
    for part, rows in (
        (slice(0, len(walks) // 2), slice(0, middle)),
        (slice(len(walks) // 2, len(walks)), slice(middle, starts[-1])),
    ):
        if part.start < part.stop:
            changed = {"requests": part, "sampled": sampled[rows], "first_row": rows.start}
            accept_path(**call | changed)
    out = AcceptedPaths(*(part.cpu() for part in call["out"]))

    tree = tree_batches.token_trees([w.parents for w in walks], slots, [w.tokens for w in walks])
    padded = torch.zeros(len(walks), slots, dtype=torch.int64)
    for request, walk in enumerate(walks):
        padded[request, : len(walk.sampled)] = torch.tensor(walk.sampled)
    scored = torch_accept_path(tree, padded)

    requests = len(walks)
    assert torch.equal(out.tokens[:requests], scored.output_tokens)
    assert torch.equal(out.path[:requests], scored.path.int())
    first, rows_of = torch.tensor(starts[:-1]), torch.tensor(starts).diff()
    last_rows = starts[-1] - 1 - (first + scored.last_node)
    assert torch.equal(out.last_rows[:requests], last_rows)
    outputs = torch.arange(requests) % READING != READING - 1
    assert torch.equal(out.num_sampled[:requests], scored.num_sampled * outputs)
    assert torch.equal(out.num_rejected[:requests], (rows_of - scored.num_sampled) * outputs)
    nodes = tree.num_nodes - 1
    counted = [(nodes > 0).sum(), nodes.sum(), scored.num_sampled[nodes > 0].sum()]
    assert out.counts.tolist() == counted
    for written in out[:-1]:
        assert (written[requests:] == SENTINEL).all(), "another request's is written"


@st.composite
def some_walks(draw: st.DrawFn) -> Walk:
    """Siblings differ; what is sampled is often a child's token."""
    draws = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2)), max_size=20)
    tokens, parents = tree_batches.grown_tree(draw(draws), root=100)
    sampled = draw(st.lists(st.integers(-1, 3), min_size=len(tokens), max_size=len(tokens)))
    return Walk(tokens, parents, sampled)


@settings(deadline=None, max_examples=30)
@given(walks=st.lists(some_walks(), min_size=1, max_size=4), slots=st.sampled_from([21, 33]))
def test_the_path_is_the_reference_s(device: torch.device, walks: list[Walk], slots: int) -> None:
    check(device, walks, slots)


@pytest.mark.parametrize("shape", [tree_batches.chain, tree_batches.star, tree_batches.bushy])
@pytest.mark.parametrize("slots", [2, 5, 33, 128])
def test_every_bit_of_every_word_counts(
    device: torch.device, shape: Callable[[int], list[int]], slots: int
) -> None:
    """Bit 31 is an int32's sign; at each word's ends one of the requests stops."""
    ends = [word + node for word in range(0, 128, 32) for node in (0, 1, 30, 31)]
    check(device, [Walk.to(min(node, slots - 1), shape(slots)) for node in ends], slots)
