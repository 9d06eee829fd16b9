# SPDX-License-Identifier: Apache-2.0
"""The walk on the device takes the path that loops take, and writes that path alone."""

from __future__ import annotations

import random
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
    poisoned,
    star,
    token_trees,
)
from vllm_redrafter.tree.acceptance import accept_path as torch_accept_path
from vllm_redrafter.triton_kernels.accept_path import accept_path

SENTINEL = -77
OUTPUTS = ("output_tokens", "num_sampled", "path", "last_row")


def naive_accept_path(
    tokens: list[int], parents: list[int], sampled: list[int]
) -> tuple[list[int], list[int]]:
    """One request's walk by a loop: (path, output tokens).

    Args:
        tokens, parents: of the request's nodes alone.
        sampled: the target's token at each of them.
    """
    path = [0]
    while True:
        here = path[-1]
        children = (
            node
            for node in range(1, len(tokens))
            if parents[node] == here and tokens[node] == sampled[here]
        )
        child = next(children, None)
        if child is None:
            return path, [sampled[node] for node in path]
        path.append(child)


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

    Rows of the requests stand apart and in reverse order. The outputs have room for two requests
    more, and `wider` columns more than T: `output_tokens` and `path`.
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
    """The kernel's outputs are those of the loop and of the torch scorer, and nothing else is."""
    call = arguments(device, walks, slots, **options)
    accept_path(**call)
    out = {name: call[name].cpu() for name in OUTPUTS}

    tree = token_trees([w.parents for w in walks], slots, [w.tokens for w in walks])
    sampled = torch.zeros(len(walks), slots, dtype=torch.int64)
    for request, walk in enumerate(walks):
        sampled[request, : len(walk.sampled)] = torch.tensor(walk.sampled)
    scored = torch_accept_path(tree, sampled)

    row_start = call["row_start"].tolist()
    for request, walk in enumerate(walks):
        path, tokens = naive_accept_path(walk.tokens, walk.parents, walk.sampled)
        for name, values in (("path", path), ("output_tokens", tokens)):
            unused = out[name].shape[1] - len(values)
            assert out[name][request].tolist() == values + [-1] * unused
        assert int(out["num_sampled"][request]) == len(path)
        assert int(out["last_row"][request]) == row_start[request] + path[-1]
    requests = len(walks)
    assert torch.equal(out["output_tokens"][:requests, :slots], scored.output_tokens)
    assert torch.equal(out["path"][:requests, :slots], scored.path.int())
    assert torch.equal(out["num_sampled"][:requests], scored.num_sampled)
    assert torch.equal(out["last_row"][:requests] - call["row_start"].cpu(), scored.last_node)
    for name in OUTPUTS:
        assert (out[name][requests:] == SENTINEL).all(), f"{name}: another request's is written"


@st.composite
def some_walks(draw: st.DrawFn) -> Walk:
    """Siblings differ; what is sampled is often a child's token."""
    tokens, parents = [100], [0]
    for choice, token in draw(
        st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2)), max_size=20)
    ):
        parent = choice % len(tokens)
        if (parent, token) not in zip(parents[1:], tokens[1:], strict=True):
            tokens.append(token)
            parents.append(parent)
    sampled = draw(st.lists(st.integers(-1, 3), min_size=len(tokens), max_size=len(tokens)))
    return Walk(tokens, parents, sampled)


@settings(deadline=None, max_examples=60)
@given(
    walks=st.lists(some_walks(), min_size=1, max_size=4),
    slots=st.sampled_from([21, 33]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    wider=st.sampled_from([(0, 0), (3, 12)]),
)
def test_the_path_is_that_of_the_loop(
    device: torch.device,
    walks: list[Walk],
    slots: int,
    dtype: torch.dtype,
    wider: tuple[int, int],
) -> None:
    check(device, walks, slots, dtype=dtype, wider=wider)


@pytest.mark.parametrize("slots", [1, 2, 5, 31, 32, 33, 64, 65, 127, 128])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_full_trees_of_any_size_are_walked(
    device: torch.device, slots: int, dtype: torch.dtype
) -> None:
    walks = [
        Walk.to(slots - 1, chain(slots)),
        Walk.to(slots // 2, chain(slots)),
        Walk.to(slots - 1, star(slots)),
        Walk.to(slots - 1, bushy(slots)),
        Walk.to(0, bushy(slots)),
        Walk.to(0, [0]),
    ]
    check(device, walks, slots, dtype=dtype)


@pytest.mark.parametrize("shape", [chain, star, bushy])
def test_every_bit_of_every_word_counts(
    device: torch.device, shape: Callable[[int], list[int]]
) -> None:
    """Bit 31 is an int32's sign; each of the 128 nodes is where one of the requests stops."""
    check(device, [Walk.to(node, shape(128)) for node in range(128)], 128)


def test_a_mismatch_anywhere_above_rejects_what_matches_below(device: torch.device) -> None:
    """On a chain of 128, in each word and at both of its ends."""
    walks = []
    for node in (1, 31, 32, 63, 64, 95, 96, 127):
        sampled = [*range(1, 128), 5000]
        sampled[node - 1] = GARBAGE
        walks.append(Walk([9000, *range(1, 128)], chain(128), sampled))
    check(device, walks, 128)


def test_a_placeholder_token_is_no_child(device: torch.device) -> None:
    """-1 is vLLM's token that is not there, and fills unused slots."""
    walk = Walk([9000, 1, 2], [0, 0, 1], [-1, -1, -1])
    call = arguments(device, [walk], 8)
    tree = token_trees([walk.parents], 8, [walk.tokens])
    call |= {"tokens": tree.tokens.to(device), "parents": tree.parents.to(device)}
    accept_path(**call)
    assert call["num_sampled"].tolist()[:1] == [1]
    assert call["path"].tolist()[0] == [0, -1, -1, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("wider", [(0, 5), (5, 0), (130, 1)])
def test_output_rows_are_filled_to_their_ends(device: torch.device, wider: tuple[int, int]) -> None:
    walks = [Walk.to(4, chain(7)), Walk.to(6, star(7)), Walk.to(6, chain(7))]
    check(device, walks, 7, wider=wider)


def test_trees_may_be_a_part_of_wider_tensors(device: torch.device) -> None:
    """Row strides are the tensors' own."""
    walks = [Walk.to(9, bushy(12, seed=r)) for r in range(5)]
    call = arguments(device, walks, 12)
    expected = {name: value.clone() for name, value in call.items()}
    accept_path(**expected)
    for name in ("tokens", "parents", "depths", "ancestors", "output_tokens", "path"):
        room = [size + 3 for size in call[name].shape]
        whole = call[name].new_full(room, GARBAGE)
        part = whole[tuple(slice(0, size) for size in call[name].shape)]
        call[name] = part.copy_(call[name])
    accept_path(**call)
    for name in OUTPUTS:
        assert torch.equal(call[name], expected[name])


def test_64_requests_are_walked(device: torch.device) -> None:
    rng = random.Random(0)
    sizes = [1 + r % 9 for r in range(64)]
    check(device, [Walk.to(rng.randrange(n), bushy(n, seed=n)) for n in sizes], 9)


def test_a_repeated_walk_gives_the_same(device: torch.device) -> None:
    call = arguments(device, [Walk.to(9, chain(12)), Walk.to(3, star(12))], 12)
    accept_path(**call)
    first = {name: call[name].clone() for name in OUTPUTS}
    # After a longer path in the same buffers, a shorter one leaves nothing of it behind.
    longer = arguments(device, [Walk.to(11, chain(12)), Walk.to(11, chain(12))], 12)
    accept_path(**longer | {name: call[name] for name in OUTPUTS})
    accept_path(**call)
    for name in OUTPUTS:
        assert torch.equal(call[name], first[name])


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def short(tensor: Tensor) -> Tensor:
    return tensor[:1]


def narrow(tensor: Tensor) -> Tensor:
    return tensor[:, :8]


INTEGERS = (
    "tokens",
    "parents",
    "depths",
    "ancestors",
    "num_nodes",
    "row_start",
    "output_tokens",
    "num_sampled",
    "path",
    "last_row",
)
REFUSED: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    *((name, Tensor.long) for name in INTEGERS),
    *((name, Tensor.float) for name in (*INTEGERS, "sampled")),
    *((name, strided) for name in (*INTEGERS, "sampled")),
    *((name, meta) for name in (*INTEGERS[1:], "sampled")),
    *((name, short) for name in INTEGERS if name != "num_nodes"),
    *((name, narrow) for name in ("parents", "depths", "ancestors", "output_tokens", "path")),
    ("parents", lambda parents: torch.cat([parents, parents], dim=1)[:, : parents.shape[1]]),
    ("ancestors", lambda bits: bits[..., :1]),
    ("ancestors", lambda bits: bits[0]),
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
