# SPDX-License-Identifier: Apache-2.0
"""Token trees hold the best explored nodes, in an order whose every prefix is again a tree."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm import naive
from redrafter_testing.algorithm.finished_beams import finished_beams
from redrafter_testing.algorithm.naive import Prefix
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.tree.token_tree import TokenTree, ancestor_mask, pack_bits

# Sums of these stay exact in float32.
TIED_STEPS = st.sampled_from([0.0, -0.5, -1.0])
DISTINCT_STEPS = st.integers(-1_000_000, -1).map(float)

drawn = settings(deadline=None, max_examples=100)
max_nodes_of_a_tree = st.integers(1, 24)


@st.composite
def explored_nodes(draw: st.DrawFn, steps: st.SearchStrategy[float] = TIED_STEPS) -> ExploredNodes:
    """What some beam search might have explored, for up to 3 requests over up to 3 tokens.

    Each level holds any of the candidates that the level above allows, best first, and dead slots
    with arbitrary contents after them. Log-probabilities are full of ties, also between a parent
    and its child.
    """
    length, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    vocab = draw(st.integers(1, 3))
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        levels: list[list[tuple[int, int, float]]] = []
        live = {0: 0.0}
        for level in range(length):
            candidates = [(slot, token) for slot in live for token in range(vocab)]
            most = min(width, len(candidates))
            least = min(most, draw(st.sampled_from([0, 1, 3, 5])))
            kept = (
                draw(
                    st.lists(
                        st.sampled_from(candidates), min_size=least, max_size=most, unique=True
                    )
                )
                if most
                else []
            )
            row = [(token, slot, live[slot] + draw(steps)) for slot, token in kept]
            row.sort(key=lambda node: -node[2])
            while len(row) < width:
                above = draw(st.integers(0, width - 1)) if level else 0
                row.append((draw(st.integers(0, vocab - 1)), above, -math.inf))
            live = {slot: node[2] for slot, node in enumerate(row) if node[2] > -math.inf}
            levels.append(row)
        requests.append(levels)
    tokens, back_pointers, log_probs = torch.tensor(requests, dtype=torch.float64).unbind(-1)
    return ExploredNodes(tokens.long(), back_pointers.long(), log_probs.float())


def root_tokens(explored: ExploredNodes) -> Tensor:
    return torch.arange(explored.tokens.shape[0]) + 100


def build(explored: ExploredNodes, max_nodes: int, **options: Any) -> TokenTree:
    return TokenTree.from_explored(root_tokens(explored), explored, max_nodes, **options)


def explored_log_probs(explored: ExploredNodes, request: int) -> dict[Prefix, float]:
    """Every node that was explored, as a prefix, with its log-probability."""
    log_probs = explored.log_probs[request].tolist()
    prefixes = naive.explored_prefixes(
        explored.tokens[request].tolist(), explored.back_pointers[request].tolist(), log_probs
    )
    return {
        prefix: log_prob
        for row, row_log_probs in zip(prefixes, log_probs, strict=True)
        for prefix, log_prob in zip(row, row_log_probs, strict=True)
        if prefix is not None
    }


def beams_of(explored: ExploredNodes, request: int) -> list[Prefix]:
    """The live beams of the last level, best first."""
    prefixes = naive.explored_prefixes(
        explored.tokens[request].tolist(),
        explored.back_pointers[request].tolist(),
        explored.log_probs[request].tolist(),
    )
    return [prefix for prefix in prefixes[-1] if prefix is not None]


def on_beams(beams: list[Prefix]) -> set[Prefix]:
    return {beam[:depth] for beam in beams for depth in range(1, len(beam) + 1)}


def prefixes_of(tree: TokenTree, request: int) -> list[Prefix]:
    """The prefix of every node, in the tree's order; the root is not among them."""
    prefixes = naive.node_prefixes(
        tree.tokens[request].tolist(),
        tree.parents[request].tolist(),
        int(tree.num_nodes[request]),
    )
    return prefixes[1:]


def assert_trees(tree: TokenTree, roots: Tensor, slots: int) -> None:
    """Everything that holds for any trees, whatever they were built from."""
    requests = len(roots)
    for field in (tree.tokens, tree.parents, tree.depths):
        assert field.shape == (requests, slots)
        assert field.dtype == torch.int32
    assert tree.num_nodes.shape == (requests,)
    assert tree.num_nodes.dtype == torch.int32
    assert tree.ancestors.shape == (requests, slots, -(-slots // 32))
    assert tree.ancestors.dtype == torch.int32
    for request in range(requests):
        tokens, parents = tree.tokens[request].tolist(), tree.parents[request].tolist()
        depths, num_nodes = tree.depths[request].tolist(), int(tree.num_nodes[request])
        assert 1 <= num_nodes <= slots
        assert (tokens[0], parents[0], depths[0]) == (int(roots[request]), 0, 0)
        for node in range(1, num_nodes):
            assert parents[node] < node, "a parent stands before its child"
            assert depths[node] == depths[parents[node]] + 1
        siblings = list(zip(parents[1:num_nodes], tokens[1:num_nodes], strict=True))
        assert len(set(siblings)) == len(siblings), "siblings carry different tokens"
        assert tokens[num_nodes:] == [-1] * (slots - num_nodes)
        assert parents[num_nodes:] == depths[num_nodes:] == [0] * (slots - num_nodes)
        assert tree.is_node[request].tolist() == [i < num_nodes for i in range(slots)]
        words = tree.ancestors[request].tolist()
        for node in range(slots):
            expected = naive.ancestors(parents, node)
            assert set(tree.ancestor_mask[request, node].nonzero().flatten().tolist()) == expected
            found = {j for j in range(slots) if words[node][j // 32] >> (j % 32) & 1}
            assert found == expected


def assert_equal(tree: TokenTree, expected: TokenTree) -> None:
    assert torch.equal(tree.tokens, expected.tokens)
    assert torch.equal(tree.parents, expected.parents)
    assert torch.equal(tree.depths, expected.depths)
    assert torch.equal(tree.num_nodes, expected.num_nodes)


@drawn
@given(explored_nodes(), max_nodes_of_a_tree, st.sampled_from(["explored", "beams"]))
def test_what_was_explored_makes_trees(explored: ExploredNodes, max_nodes: int, kind: str) -> None:
    tree = build(explored, max_nodes, tree=kind)
    assert_trees(tree, root_tokens(explored), max_nodes + 1)


@drawn
@given(explored_nodes(), max_nodes_of_a_tree)
def test_nodes_are_the_best_explored_in_descending_order(
    explored: ExploredNodes, max_nodes: int
) -> None:
    tree = build(explored, max_nodes)
    for request in range(len(explored.tokens)):
        log_probs = explored_log_probs(explored, request)
        prefixes = prefixes_of(tree, request)
        assert len(set(prefixes)) == len(prefixes)
        # Of two equally probable nodes on one level, either may be kept.
        order = [(log_probs[prefix], len(prefix)) for prefix in prefixes]
        best = naive.best_nodes(log_probs, max_nodes)
        assert order == [(log_probs[prefix], len(prefix)) for prefix in best]


@drawn
@given(explored_nodes(DISTINCT_STEPS), max_nodes_of_a_tree)
def test_without_ties_the_nodes_are_exactly_the_best_explored(
    explored: ExploredNodes, max_nodes: int
) -> None:
    tree = build(explored, max_nodes)
    for request in range(len(explored.tokens)):
        log_probs = explored_log_probs(explored, request)
        assume(len(set(log_probs.values())) == len(log_probs))
        assert prefixes_of(tree, request) == naive.best_nodes(log_probs, max_nodes)


@drawn
@given(explored_nodes(), st.integers(0, 3))
def test_room_for_all_candidates_and_more_leaves_unused_slots(
    explored: ExploredNodes, more: int
) -> None:
    _, length, width = explored.tokens.shape
    tree = build(explored, length * width + more)
    assert_trees(tree, root_tokens(explored), length * width + more + 1)
    for request in range(len(explored.tokens)):
        expected = explored_log_probs(explored, request)
        assert int(tree.num_nodes[request]) == len(expected) + 1
        assert set(prefixes_of(tree, request)) == set(expected)


@drawn
@given(explored_nodes(), max_nodes_of_a_tree)
def test_a_beams_tree_holds_the_best_prefixes_of_finished_beams_and_nothing_else(
    explored: ExploredNodes, max_nodes: int
) -> None:
    tree = build(explored, max_nodes, tree="beams")
    for request in range(len(explored.tokens)):
        log_probs = explored_log_probs(explored, request)
        allowed = on_beams(beams_of(explored, request))
        prefixes = prefixes_of(tree, request)
        assert set(prefixes) <= allowed
        best = naive.best_nodes({p: q for p, q in log_probs.items() if p in allowed}, max_nodes)
        order = [(log_probs[prefix], len(prefix)) for prefix in prefixes]
        assert order == [(log_probs[prefix], len(prefix)) for prefix in best]


@pytest.mark.parametrize("vocab", [1, 2, 3, 8])
@pytest.mark.parametrize(("width", "length"), [(1, 4), (4, 1), (4, 4), (6, 3)])
@pytest.mark.parametrize("max_nodes", [1, 5, 30])
def test_a_real_searchs_beams_tree_is_the_papers_dedup(
    vocab: int, width: int, length: int, max_nodes: int
) -> None:
    torch.manual_seed(0)
    drafter = RecurrentHead(RecurrentConfig(vocab, hidden_size=6, exit_dim=12))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    embedding, hidden, roots = torch.randn(vocab, 6), torch.randn(4, 6), torch.zeros(4).long()
    explored = beam_search(drafter, embedding.__getitem__, hidden, roots, width, length)
    tree = TokenTree.from_explored(roots, explored, max_nodes, tree="beams")
    assert_trees(tree, roots, max_nodes + 1)
    beams, log_probs = finished_beams(explored)
    for request in range(len(roots)):
        live = log_probs[request, :, -1] > -math.inf
        prefixes = naive.trie(beams[request, live].tolist(), log_probs[request, live].tolist())
        assert prefixes_of(tree, request) == naive.best_nodes(prefixes, max_nodes)


@drawn
@given(explored_nodes(), max_nodes_of_a_tree, st.sampled_from(["explored", "beams"]), st.data())
def test_a_chain_is_a_best_path_and_leaves_other_requests_alone(
    explored: ExploredNodes, max_nodes: int, kind: str, data: st.DataObject
) -> None:
    requests = len(explored.tokens)
    chain = data.draw(st.lists(st.booleans(), min_size=requests, max_size=requests))
    tree = build(explored, max_nodes, tree=kind, chain=torch.tensor(chain))
    free = build(explored, max_nodes, tree=kind)
    assert_trees(tree, root_tokens(explored), max_nodes + 1)
    for request in range(requests):
        if chain[request]:
            beams = on_beams(beams_of(explored, request))
            found = explored_log_probs(explored, request)
            allowed = [node for node in found if kind == "explored" or node in beams]
            expected = {
                path: sum(math.exp(found[path[:depth]]) for depth in range(1, len(path) + 1))
                for path in allowed
            }
            most = max(expected.values(), default=0.0)
            best = [path for path in allowed if expected[path] > most - 1e-5]
            kept = prefixes_of(tree, request)
            assert kept in [
                [path[:depth] for depth in range(1, min(len(path), max_nodes) + 1)]
                for path in best or [()]
            ]
        else:
            assert prefixes_of(tree, request) == prefixes_of(free, request)


def test_a_tree_of_kind_chain_is_a_chain_for_every_request() -> None:
    explored = ExploredNodes(
        torch.tensor([[[1, 2], [3, 4]]]).repeat(2, 1, 1),
        torch.tensor([[[0, 0], [0, 1]]]).repeat(2, 1, 1),
        torch.tensor([[[-0.1, -0.2], [-5.0, -0.3]], [[-0.1, -0.2], [-0.2, -0.3]]]),
    )
    tree = build(explored, 3, tree="chain")
    assert prefixes_of(tree, 0) == [(2,), (2, 4)]
    assert prefixes_of(tree, 1) == [(1,), (1, 3)]


@drawn
@given(explored_nodes(), max_nodes_of_a_tree, st.data())
def test_any_prefix_of_the_nodes_is_again_a_tree(
    explored: ExploredNodes, max_nodes: int, data: st.DataObject
) -> None:
    requests, slots = len(explored.tokens), max_nodes + 1
    tree = build(explored, max_nodes)
    # Also more nodes than a request has, and more than there are slots.
    sizes = data.draw(
        st.lists(st.integers(1, slots + 2), min_size=requests, max_size=requests), label="sizes"
    )
    cut = tree.prefix(torch.tensor(sizes))
    assert_trees(cut, root_tokens(explored), slots)
    for request, size in enumerate(sizes):
        kept = min(size, int(tree.num_nodes[request]))
        assert int(cut.num_nodes[request]) == kept
        assert torch.equal(cut.tokens[request, :kept], tree.tokens[request, :kept])
        assert torch.equal(cut.parents[request, :kept], tree.parents[request, :kept])
        assert torch.equal(cut.depths[request, :kept], tree.depths[request, :kept])


@drawn
@given(explored_nodes(), st.integers(2, 24), st.data())
def test_a_prefix_is_the_tree_of_a_smaller_k(
    explored: ExploredNodes, max_nodes: int, data: st.DataObject
) -> None:
    smaller = data.draw(st.integers(1, max_nodes))
    cut = build(explored, max_nodes).prefix(smaller + 1)
    expected = build(explored, smaller)
    assert torch.equal(cut.tokens[:, : smaller + 1], expected.tokens)
    assert torch.equal(cut.parents[:, : smaller + 1], expected.parents)
    assert torch.equal(cut.depths[:, : smaller + 1], expected.depths)
    assert torch.equal(cut.num_nodes, expected.num_nodes)


def test_a_prefix_leaves_the_tree_it_was_cut_from_alone() -> None:
    explored = chain_or_star(length=5, width=1)
    tree = build(explored, 5)
    before = tree.tokens.clone(), tree.num_nodes.clone(), tree.ancestors.clone()
    cut = tree.prefix(3)
    assert cut.ancestors[0, :, 0].tolist() == [0b1, 0b11, 0b111, 0b1001, 0b10001, 0b100001]
    assert torch.equal(before[0], tree.tokens)
    assert torch.equal(before[1], tree.num_nodes)
    assert torch.equal(before[2], tree.ancestors)


@drawn
@given(explored_nodes(), max_nodes_of_a_tree, st.data())
def test_selected_trees_are_those_of_the_requests_asked_for(
    explored: ExploredNodes, max_nodes: int, data: st.DataObject
) -> None:
    tree = build(explored, max_nodes)
    last = len(explored.tokens) - 1
    requests = data.draw(st.lists(st.integers(0, last), max_size=4), label="requests")
    index = torch.tensor(requests, dtype=torch.int64)
    selected = tree.select(index)
    assert_trees(selected, root_tokens(explored)[index], max_nodes + 1)
    for row, request in enumerate(requests):
        assert prefixes_of(selected, row) == prefixes_of(tree, request)


def chain_or_star(length: int, width: int) -> ExploredNodes:
    """One request: a chain for width 1, a star for length 1."""
    count = torch.arange(length * width).view(1, length, width)
    return ExploredNodes(count, torch.zeros_like(count), -count.float())


def test_a_full_chain_has_every_bit_of_every_word() -> None:
    tree = build(chain_or_star(length=127, width=1), 127)
    assert_trees(tree, torch.tensor([100]), 128)
    assert tree.depths[0].tolist() == list(range(128))
    words = tree.ancestors[0].tolist()
    # A word is an int32: all 32 bits are -1, bit 31 alone is -2**31.
    assert words[0] == [1, 0, 0, 0]
    assert words[30] == [2**31 - 1, 0, 0, 0]
    assert words[31] == [-1, 0, 0, 0]
    assert words[32] == [-1, 1, 0, 0]
    assert words[63] == [-1, -1, 0, 0]
    assert words[64] == [-1, -1, 1, 0]
    assert words[127] == [-1, -1, -1, -1]


def test_a_full_star_has_one_bit_per_leaf_besides_the_root() -> None:
    tree = build(chain_or_star(length=1, width=127), 127)
    assert_trees(tree, torch.tensor([100]), 128)
    assert tree.depths[0].tolist() == [0] + [1] * 127
    words = tree.ancestors[0].tolist()
    assert words[31] == [1 - 2**31, 0, 0, 0]
    assert words[32] == [1, 1, 0, 0]
    assert words[63] == [1, -(2**31), 0, 0]
    assert words[64] == [1, 0, 1, 0]
    assert words[127] == [1, 0, 0, -(2**31)]


def test_children_as_probable_as_their_parents_stand_after_them() -> None:
    """A log-probability of 0: tokens that are certain, or too likely for float32 to tell."""
    certain = chain_or_star(length=40, width=3)
    explored = ExploredNodes(
        certain.tokens, torch.arange(3).expand(1, 40, 3), torch.zeros(1, 40, 3)
    )
    tree = build(explored, 127)
    assert_trees(tree, torch.tensor([100]), 128)
    assert tree.depths[0, :121].tolist() == [0, *(1 + i // 3 for i in range(120))]


def test_k_one_keeps_the_best_node_alone() -> None:
    tree = build(chain_or_star(length=1, width=3), 1)
    assert tree.tokens.tolist() == [[100, 0]]
    assert tree.num_nodes.tolist() == [2]


def test_nothing_explored_leaves_the_root() -> None:
    nothing = torch.zeros(2, 3, 4, dtype=torch.int64)
    explored = ExploredNodes(nothing, nothing, torch.full(nothing.shape, -math.inf))
    tree = build(explored, 5)
    assert_trees(tree, torch.tensor([100, 101]), 6)
    assert tree.num_nodes.tolist() == [1, 1]


@drawn
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40))
def test_ancestors_of_any_parents_are_those_found_by_climbing(draws: list[int]) -> None:
    parents = [0, *(value % (i + 1) for i, value in enumerate(draws))]
    mask = ancestor_mask(torch.tensor([parents]))
    for node in range(len(parents)):
        found = set(mask[0, node].nonzero().flatten().tolist())
        assert found == naive.ancestors(parents, node)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 65, 128])
def test_bit_sets_hold_bit_j_in_word_j_over_32(size: int) -> None:
    torch.manual_seed(size)
    mask = torch.cat([torch.rand(5, size) < 0.5, torch.eye(size).bool()])
    packed = pack_bits(mask)
    assert packed.dtype == torch.int32
    for row, words in zip(mask.tolist(), packed.tolist(), strict=True):
        assert len(words) == -(-size // 32)
        total = sum((word % 2**32) << (32 * i) for i, word in enumerate(words))
        assert total == sum(1 << j for j in range(size) if row[j])
