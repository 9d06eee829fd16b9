# SPDX-License-Identifier: Apache-2.0
"""Trees built on the device are those that TokenTree builds, and those that sorting gives."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import GARBAGE
from redrafter_testing.gpu.built_trees import (
    FIELDS,
    SENTINEL,
    buffers,
    on,
    random_search,
    roots,
)
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.triton_kernels.build_tree import (
    DraftRows,
    NodeLimits,
    ScoredTrees,
    TreeBuffers,
    build_tree,
)

INTEGERS = st.sampled_from([torch.int32, torch.int64])


def naive_build_tree(
    root_tokens: Tensor, tokens: Tensor, back_pointers: Tensor, log_probs: Tensor, max_nodes: int
) -> list[dict[str, list[int]]]:
    """`build_tree` by sorting and dictionaries: per request tokens, parents, depths, ancestors.

    Lists end at the last node; an ancestor set is one Python integer. `candidates` are the kept
    ones, numbered level by level: node 1's first.
    """
    trees = []
    _, length, width = tokens.shape
    for request, root in enumerate(root_tokens.tolist()):
        candidates = [
            (-float(log_probs[request, level, beam]), level, beam)
            for level in range(length)
            for beam in range(width)
            if log_probs[request, level, beam] > -torch.inf
        ]
        kept = sorted(candidates)[:max_nodes]
        node_of = {(level, beam): i for i, (_, level, beam) in enumerate(kept, start=1)}
        parents, ancestors = [0], [1]
        for _, level, beam in kept:
            above = (level - 1, int(back_pointers[request, level, beam]))
            parents.append(node_of[above] if level else 0)
            ancestors.append(ancestors[parents[-1]] | 1 << len(ancestors))
        trees.append(
            {
                "tokens": [root, *(int(tokens[request, level, b]) for _, level, b in kept)],
                "parents": parents,
                "depths": [0, *(level + 1 for _, level, _ in kept)],
                "ancestors": ancestors,
                "candidates": [level * width + beam for _, level, beam in kept],
            }
        )
    return trees


def assert_built(out: TreeBuffers, expected: TokenTree, naive: list[dict[str, list[int]]]) -> None:
    """Equal to both references; the buffers' other requests are untouched."""
    requests = len(naive)
    for name in FIELDS:
        found = getattr(out, name).cpu()
        assert torch.equal(found[:requests], getattr(expected, name)), name
        assert (found[requests:] == SENTINEL).all(), f"{name}: another request's is written"
    for request, tree in enumerate(naive):
        nodes = len(tree["tokens"])
        assert int(out.num_nodes[request]) == nodes
        for name in ("tokens", "parents", "depths"):
            assert getattr(out, name)[request, :nodes].tolist() == tree[name]
        for words, bits in zip(
            out.ancestors[request, :nodes].tolist(), tree["ancestors"], strict=True
        ):
            assert sum((word % 2**32) << (32 * i) for i, word in enumerate(words)) == bits


def check(
    device: torch.device,
    explored: ExploredNodes,
    max_nodes: int,
    *,
    tokens: torch.dtype = torch.int64,
    pointers: torch.dtype = torch.int64,
    root: torch.dtype = torch.int64,
    more_requests: int = 0,
) -> TreeBuffers:
    """`build_tree` on a search's nodes, with garbage in the back-pointers that point nowhere."""
    requests = len(explored.tokens)
    nowhere = explored.log_probs == -math.inf
    nowhere[:, 0] = True
    back_pointers = explored.back_pointers.masked_fill(nowhere, GARBAGE)
    out = buffers(device, requests + more_requests, max_nodes)
    returned = build_tree(
        roots(requests, root).to(device),
        explored.tokens.to(tokens).to(device),
        back_pointers.to(pointers).to(device),
        explored.log_probs.to(device),
        out,
    )
    assert returned is out
    expected = TokenTree.from_explored(roots(requests), explored, max_nodes)
    naive = naive_build_tree(
        roots(requests), explored.tokens, explored.back_pointers, explored.log_probs, max_nodes
    )
    assert_built(out, expected, naive)
    return out


# What a kernel is compiled for varies little: on a GPU, each combination takes seconds.
lengths_and_widths = st.sampled_from([(1, 1), (1, 5), (3, 4), (4, 3), (5, 2)])
sizes = st.sampled_from([1, 2, 7, 12, 31, 32, 40])


@st.composite
def searches(draw: st.DrawFn) -> ExploredNodes:
    """Up to 3 requests. Scores are full of ties, also between parent and child; some are -inf."""
    length, width = draw(lengths_and_widths)
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        levels: list[list[tuple[int, int, float]]] = []
        for level in range(length):
            above = levels[-1] if level else [(0, 0, 0.0)]
            live = [slot for slot, node in enumerate(above) if node[2] > -math.inf]
            row = []
            for _ in range(width):
                if live and draw(st.integers(0, 3)):
                    slot = draw(st.sampled_from(live))
                    score = above[slot][2] + draw(st.sampled_from([0.0, -0.5, -1.0]))
                else:
                    slot, score = 0, -math.inf
                row.append((draw(st.integers(0, 1000)), slot, score))
            levels.append(row)
        requests.append(levels)
    tokens, back_pointers, log_probs = torch.tensor(requests, dtype=torch.float64).unbind(-1)
    return ExploredNodes(tokens.long(), back_pointers.long(), log_probs.float())


@settings(deadline=None, max_examples=40)
@given(searches(), sizes, st.booleans())
def test_scored_trees_keep_each_node_s_score_and_log_odds(
    device: torch.device, explored: ExploredNodes, max_nodes: int, in_entries: bool
) -> None:
    requests = len(explored.tokens)
    log_odds = torch.randn(explored.log_probs.shape)
    entries = torch.arange(requests).flip(0) + 1 if in_entries else torch.arange(requests)
    out = ScoredTrees(requests + 1, max_nodes, device)
    untouched = {*range(requests + 1)} - {*entries.tolist()}
    for field in (out.log_probs, out.log_odds):
        field.fill_(SENTINEL)
    build_tree(
        roots(requests).to(device),
        *on(device, explored),
        out=out,
        entries=entries.to(device) if in_entries else None,
        log_odds=log_odds.to(device),
    )
    naive = naive_build_tree(
        roots(requests), explored.tokens, explored.back_pointers, explored.log_probs, max_nodes
    )
    for request, entry in enumerate(entries.tolist()):
        kept = naive[request]["candidates"]
        unused = max_nodes - len(kept)
        scores = explored.log_probs[request].flatten()[kept].tolist()
        assert out.log_probs[entry].tolist() == [0.0, *scores, *[-math.inf] * unused]
        own_log_odds = log_odds[request].flatten()[kept].tolist()
        assert out.log_odds[entry].tolist() == [0.0, *own_log_odds, *[0.0] * unused]
    for entry in untouched:
        assert (out.log_probs[entry] == SENTINEL).all() and (out.log_odds[entry] == SENTINEL).all()


@pytest.mark.parametrize("levels", [2, 0])
def test_a_chain_ends_where_its_request_s_candidates_do(device: torch.device, levels: int) -> None:
    """Below it, and beside it, are those of other requests."""
    explored = random_search(3, 4, 3)
    chain = torch.tensor([True, False, True])
    limits = torch.full((3,), 12)
    is_below = chain[:, None, None] & (torch.arange(4) >= levels)[:, None]
    explored = replace(explored, log_probs=explored.log_probs.masked_fill(is_below, -torch.inf))
    out = ScoredTrees(3, 12, device)
    build_tree(
        roots(3).to(device),
        *on(device, explored),
        out,
        node_limits=NodeLimits(chain.int().to(device), limits.int().to(device)),
    )
    expected = TokenTree.from_explored(roots(3), explored, 12, chain=chain)
    assert out.num_nodes[1] == 13
    assert max(out.num_nodes[0], out.num_nodes[2]) == levels + 1
    assert torch.equal(out.num_nodes.cpu(), expected.num_nodes)
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(out, name).cpu(), getattr(expected, name)), name


def test_trees_keep_the_lengths_of_their_nodes_matches(device: torch.device) -> None:
    explored = random_search(2, 3, 4)
    match_lengths = torch.arange(24, dtype=torch.int32).view(2, 3, 4) % 6
    out = ScoredTrees(3, 20, device)
    for field in (out.log_probs, out.match_lengths):
        field.fill_(SENTINEL)
    build_tree(
        roots(2).to(device),
        *on(device, explored),
        out=out,
        entries=torch.tensor([2, 0], device=device),
        match_lengths=match_lengths.to(device),
    )
    found = explored.tokens, explored.back_pointers, explored.log_probs
    for request, entry in ((0, 2), (1, 0)):
        kept = naive_build_tree(roots(2), *found, 20)[request]["candidates"]
        own = match_lengths[request].flatten()[kept].tolist()
        assert out.match_lengths[entry].tolist() == [0, *own, *[0] * (20 - len(kept))]
    assert (out.match_lengths[1] == SENTINEL).all()
    assert (out.log_probs == SENTINEL).all(), "nobody gave log-odds"


@settings(deadline=None, max_examples=20)
@given(searches(), sizes, st.data())
def test_chains_limits_and_rows_are_those_of_the_references(
    device: torch.device, explored: ExploredNodes, max_nodes: int, data: st.DataObject
) -> None:
    """Chains beside trees, garbage where back-pointers point nowhere, limits of any size."""
    requests = len(explored.tokens)
    chain = torch.tensor(data.draw(st.lists(st.booleans(), min_size=requests, max_size=requests)))
    limits = data.draw(st.lists(st.integers(1, 50), min_size=requests, max_size=requests))
    nowhere = explored.log_probs == -math.inf
    nowhere[:, 0] = True
    given_pointers = explored.back_pointers.masked_fill(nowhere, GARBAGE)
    out = ScoredTrees(requests, max_nodes, device)
    tokens = torch.full((requests, max_nodes), SENTINEL, device=device)
    probs = torch.full((requests, max_nodes), math.nan, device=device)
    build_tree(
        roots(requests).to(device),
        *on(device, replace(explored, back_pointers=given_pointers)),
        out,
        log_odds=torch.zeros(explored.log_probs.shape, device=device),
        node_limits=NodeLimits(chain.int().to(device), torch.tensor(limits).int().to(device)),
        rows=DraftRows(tokens, probs),
    )
    expected = TokenTree.from_explored(roots(requests), explored, max_nodes, chain=chain)
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(out, name).cpu(), getattr(expected, name)), name
    most = torch.tensor(limits) + 1
    assert torch.equal(out.num_nodes.cpu(), expected.num_nodes.minimum(most).int())
    assert torch.equal(tokens.cpu(), expected.tokens[:, 1:].clamp(min=0).long())
    scores = out.log_probs.cpu()
    own = probs.cpu().cumprod(dim=1)
    within = torch.arange(1, max_nodes + 1) < torch.minimum(most, expected.num_nodes)[:, None]
    torch.testing.assert_close(own, scores[:, 1:].exp().masked_fill(~within, 0.0))


@settings(deadline=None, max_examples=60)
@given(searches(), sizes, INTEGERS, INTEGERS, INTEGERS, st.integers(0, 2))
def test_the_tree_of_a_search_is_that_of_both_references(
    device: torch.device,
    explored: ExploredNodes,
    max_nodes: int,
    tokens: torch.dtype,
    pointers: torch.dtype,
    root: torch.dtype,
    more_requests: int,
) -> None:
    check(
        device,
        explored,
        max_nodes,
        tokens=tokens,
        pointers=pointers,
        root=root,
        more_requests=more_requests,
    )


@pytest.mark.parametrize(
    ("length", "width", "max_nodes"),
    [(5, 10, 49), (5, 10, 50), (5, 10, 127), (3, 7, 20), (7, 33, 100), (127, 1, 127), (1, 50, 33)],
)
def test_searches_of_any_size_make_trees(
    device: torch.device, length: int, width: int, max_nodes: int
) -> None:
    """More slots than candidates and fewer; widths that are no power of two; a chain; a star."""
    check(device, random_search(2, length, width), max_nodes, more_requests=1)


@pytest.mark.parametrize(("length", "width"), [(16, 128), (45, 45)])
def test_up_to_2048_candidates_are_ranked(device: torch.device, length: int, width: int) -> None:
    check(device, random_search(1, length, width), 127)


def test_equal_scores_go_by_level_then_by_beam(device: torch.device) -> None:
    """A log-probability of 0: all are certain, and the first levels are kept."""
    zeros = torch.zeros(1, 9, 3)
    tokens = torch.arange(27).view(1, 9, 3)
    out = check(device, ExploredNodes(tokens, torch.arange(3).expand(1, 9, 3), zeros), 20)
    assert out.tokens[0].tolist() == [100, *range(20)]


def test_nodes_of_128_have_all_bits(device: torch.device) -> None:
    """Node 31 and its like are the sign of a word; on a chain each node has all bits before it."""
    scores = -torch.arange(127.0).view(1, 127, 1)
    zeros = torch.zeros(1, 127, 1, dtype=torch.int64)
    out = check(device, ExploredNodes(zeros, zeros, scores), 127)
    assert out.ancestors[0, 127].tolist() == [-1, -1, -1, -1]
    assert out.ancestors[0, 31].tolist() == [-1, 0, 0, 0]
    assert out.ancestors[0, 63].tolist() == [-1, -1, 0, 0]


def test_no_candidates_leave_the_root(device: torch.device) -> None:
    nothing = torch.full((2, 3, 4), 7, dtype=torch.int64)
    out = check(device, ExploredNodes(nothing, nothing % 4, torch.full((2, 3, 4), -math.inf)), 5)
    assert out.num_nodes.tolist() == [1, 1]
    assert out.tokens.tolist() == [[100, -1, -1, -1, -1, -1], [101, -1, -1, -1, -1, -1]]


def test_64_requests_are_built(device: torch.device) -> None:
    check(device, random_search(64, 2, 3), 5)


def test_a_smaller_tree_leaves_nothing_of_a_larger_one(device: torch.device) -> None:
    large, small = random_search(2, 4, 3), random_search(2, 4, 3, seed=1)
    small = replace(small, log_probs=small.log_probs.masked_fill(small.log_probs < -1, -math.inf))
    out = check(device, small, 9)
    first = {name: getattr(out, name).clone() for name in FIELDS}
    for explored in (large, small, small):
        build_tree(roots(2).to(device), *on(device, explored), out)
    for name in FIELDS:
        assert torch.equal(getattr(out, name), first[name])


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_trees_go_to_the_entries_named(device: torch.device, integers: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, (3, 2, 4), generator=generator)
    back_pointers = torch.randint(4, (3, 2, 4), generator=generator)
    log_probs = -torch.rand(3, 2, 4, generator=generator).cumsum(1)
    arguments = [x.to(device) for x in (roots(3), tokens, back_pointers, log_probs)]
    in_order = build_tree(*arguments, out=buffers(device, 3, 6))
    entries = torch.tensor([4, 0, 2])
    out = build_tree(*arguments, out=buffers(device, 6, 6), entries=entries.to(integers).to(device))
    for name in FIELDS:
        found = getattr(out, name).cpu()
        assert torch.equal(found[entries], getattr(in_order, name).cpu()), name
        assert (found[[1, 3, 5]] == SENTINEL).all(), f"{name}: another entry is written"
