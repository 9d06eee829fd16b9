# SPDX-License-Identifier: Apache-2.0
"""Trees built on the device are those that TokenTree builds; what does not fit is refused."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm.random_trees import explored_nodes, random_search
from redrafter_testing.algorithm.tree_batches import GARBAGE
from vllm_redrafter.config import LONGEST_PATH, MOST_MATCHES, TOP_TOKENS
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.triton_kernels.build_tree import (
    MAX_CANDIDATES,
    NodeLimits,
    ScoredTrees,
    TreeBuffers,
    build_tree,
)

SENTINEL = -77
FIELDS = ("tokens", "parents", "depths", "num_nodes", "ancestors")


def roots(requests: int) -> Tensor:
    return torch.arange(requests) + 100


def on(device: torch.device, explored: ExploredNodes) -> list[Tensor]:
    tensors = (explored.tokens, explored.back_pointers, explored.log_probs)
    return [tensor.to(device) for tensor in tensors]


def poisoned_pointers(explored: ExploredNodes) -> torch.Tensor:
    """Garbage in the back-pointers that point nowhere."""
    nowhere = explored.log_probs == -math.inf
    nowhere[:, 0] = True
    return explored.back_pointers.masked_fill(nowhere, GARBAGE)


# What a kernel is compiled for varies little: on a GPU, each combination takes seconds.
lengths_and_widths = st.sampled_from([(1, 1), (1, 5), (3, 4), (4, 3), (5, 2)])
sizes = st.sampled_from([1, 2, 7, 12, 31, 32, 40])


@settings(deadline=None, max_examples=30)
@given(explored_nodes(lengths_and_widths), sizes, st.data())
def test_trees_with_all_that_goes_with_them_are_the_reference_s(
    device: torch.device, explored: ExploredNodes, max_nodes: int, data: st.DataObject
) -> None:
    """Chains beside trees, limits of any size, entries in any order."""
    requests, shape = len(explored.tokens), explored.tokens.shape
    chains = torch.tensor(data.draw(st.lists(st.booleans(), min_size=4, max_size=4)))
    limits = torch.tensor(data.draw(st.lists(st.integers(1, 50), min_size=4, max_size=4)))
    entries = torch.tensor(data.draw(st.permutations(range(requests + 1)))[:requests])
    chain, (chains, limits) = chains[entries], (chains[: requests + 1], limits[: requests + 1])
    log_odds, lengths = torch.randn(shape), torch.arange(explored.tokens.numel()).view(shape) % 6
    out = ScoredTrees(requests + 1, max_nodes, device)
    fields = out.tokens, out.num_nodes, out.log_probs, out.log_odds, out.match_classes, out.probs
    for field in fields:
        field.fill_(SENTINEL)
    tokens = torch.full((requests, max_nodes), SENTINEL, device=device)
    build_tree(
        roots(requests).to(device),
        explored.tokens.to(device),
        poisoned_pointers(explored).to(device),
        explored.log_probs.to(device),
        out,
        entries=entries.to(device),
        log_odds=log_odds.to(device),
        match_classes=lengths.int().to(device),
        node_limits=NodeLimits(chains.int().to(device), limits.int().to(device)),
        drafts=tokens,
    )
    expected = TokenTree.from_explored(roots(requests), explored, max_nodes, chain=chain)
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(out, name)[entries].cpu(), getattr(expected, name)), name
    most = limits[entries] + 1
    assert torch.equal(out.num_nodes[entries].cpu(), expected.num_nodes.minimum(most).int())
    assert torch.equal(tokens.cpu(), expected.tokens[:, 1:].clamp(min=0).long())

    # The same trees, with each node's index for its token.
    index = torch.arange(shape[1] * shape[2]).view(1, *shape[1:]).expand(shape)
    marked = replace(explored, tokens=index)
    kept = TokenTree.from_explored(roots(requests), marked, max_nodes, chain=chain).tokens[:, 1:]
    for name, of_node, unused in (
        ("log_probs", explored.log_probs, -math.inf),
        ("log_odds", log_odds, 0.0),
        ("match_classes", lengths, 0),
    ):
        found = getattr(out, name)[entries].cpu()
        own = of_node.flatten(1).gather(1, kept.long().clamp(min=0)).masked_fill(kept < 0, unused)
        assert torch.equal(found[:, 1:], own.to(found.dtype)) and not found[:, 0].any(), name
    (other,) = {*range(requests + 1)} - {*entries.tolist()}
    for field in fields:
        assert (field[other] == SENTINEL).all(), "another entry is written"
    scores = out.log_probs[entries].cpu()[:, 1:].exp()
    within = torch.arange(1, max_nodes + 1) < torch.minimum(most, expected.num_nodes)[:, None]
    probs = out.probs[entries].cpu()[:, 1:]
    torch.testing.assert_close(probs.cumprod(dim=1), scores.masked_fill(~within, 0.0))


@pytest.mark.parametrize(
    ("length", "width", "max_nodes"),
    [(5, 10, 49), (5, 10, 127), (7, 33, 100), (127, 1, 127), (1, 50, 33), (8, 128, 127)],
)
def test_searches_of_any_size_make_trees(
    device: torch.device, length: int, width: int, max_nodes: int
) -> None:
    """More slots than candidates and fewer; widths that are no power of two; a chain; a star."""
    explored, out = random_search(1, length, width), ScoredTrees(2, max_nodes, device)
    for name in FIELDS:
        getattr(out, name).fill_(SENTINEL)
    given = replace(explored, back_pointers=poisoned_pointers(explored))
    chains, limits, entries = torch.tensor([[0] * 2, [max_nodes] * 2, [0] * 2], device=device)
    drafts = torch.zeros(1, max_nodes, dtype=torch.int64, device=device)
    asked = NodeLimits(chains.int(), limits.int())
    build_tree(roots(1).to(device), *on(device, given), out, entries[:1], asked, drafts)
    expected = TokenTree.from_explored(roots(1), explored, max_nodes)
    for name in FIELDS:
        found = getattr(out, name).cpu()
        assert torch.equal(found[:1], getattr(expected, name)), name
        assert (found[1] == SENTINEL).all(), f"{name}: another request's is written"


def test_trees_have_a_node_at_least_and_fit_a_program(device: torch.device) -> None:
    assert LONGEST_PATH * (TOP_TOKENS + MOST_MATCHES) <= MAX_CANDIDATES
    for max_nodes in (0, 128, -1):
        with pytest.raises(ValueError, match=r"^max_nodes must be 1 to 127"):
            TreeBuffers(2, max_nodes, device)
