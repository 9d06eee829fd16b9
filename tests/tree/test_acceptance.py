# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk follows what the target sampled, and loses nothing of its distribution."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm import naive
from redrafter_testing.algorithm.naive import Prefix
from vllm_redrafter.tree.acceptance import AcceptedPath, accept_path
from vllm_redrafter.tree.step import Node, walk
from vllm_redrafter.tree.token_tree import TokenTree

VOCAB = 3
ROOT = 100
GARBAGE = st.integers(-(2**40), 2**40) | st.integers(-1, VOCAB)


@dataclass(frozen=True)
class Nodes:
    """One tree: the root and its other nodes, parents before children."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def grow(cls, draws: Sequence[tuple[int, int]]) -> "Nodes":
        """Add a node per (integer that chooses its parent, token), unless a sibling has it."""
        tree = cls([ROOT], [0])
        for choice, token in draws:
            parent = choice % len(tree.tokens)
            siblings = zip(tree.parents[1:], tree.tokens[1:], strict=True)
            if (parent, token) not in siblings:
                tree.tokens.append(token)
                tree.parents.append(parent)
        return tree

    def __len__(self) -> int:
        return len(self.tokens)


def batch(trees: Sequence[Nodes], slots: int) -> TokenTree:
    """The trees side by side, unused slots filled as a TokenTree fills them."""
    tokens, parents, depths = [], [], []
    for tree in trees:
        unused = slots - len(tree)
        tokens.append(tree.tokens + [-1] * unused)
        parents.append(tree.parents + [0] * unused)
        prefixes = naive.node_prefixes(tree.tokens, tree.parents, len(tree))
        depths.append([len(prefix) for prefix in prefixes] + [0] * unused)
    columns = [torch.tensor(rows, dtype=torch.int32) for rows in (tokens, parents, depths)]
    return TokenTree(*columns, torch.tensor([len(tree) for tree in trees], dtype=torch.int32))


def assert_walked(accepted: AcceptedPath, tree: TokenTree, sampled: Tensor) -> None:
    """Every request's result is that of the step's own walk."""
    slots = tree.tokens.shape[1]
    assert accepted.output_tokens.dtype == accepted.num_sampled.dtype == torch.int32
    assert accepted.path.dtype == accepted.last_node.dtype == torch.int64
    for request in range(len(sampled)):
        links = tree.tokens[request].tolist(), tree.parents[request].tolist()
        nodes = [Node(*link, 0, 0.0) for link in zip(*links, strict=True)]
        drawn = sampled[request].tolist()
        path, output = walk(nodes[: int(tree.num_nodes[request])], lambda at, _: drawn[at])  # noqa: B023
        unused = [-1] * (slots - len(path))
        assert accepted.output_tokens[request].tolist() == output + unused
        assert int(accepted.num_sampled[request]) == len(output)
        assert accepted.path[request].tolist() == path + unused
        assert int(accepted.last_node[request]) == path[-1]


some_nodes = st.builds(
    Nodes.grow,
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, VOCAB - 1)), max_size=14),
)


@st.composite
def scored_trees(draw: st.DrawFn) -> tuple[TokenTree, Tensor]:
    """Up to 3 trees, and what was sampled at their nodes; garbage in the unused slots."""
    trees = draw(st.lists(some_nodes, min_size=1, max_size=3))
    slots = max(map(len, trees)) + draw(st.integers(0, 3))
    tokens = st.integers(0, VOCAB - 1)
    sampled = [
        [draw(tokens if slot < len(tree) else GARBAGE) for slot in range(slots)] for tree in trees
    ]
    return batch(trees, slots), torch.tensor(sampled)


drawn = settings(deadline=None, max_examples=200)


@drawn
@given(scored_trees())
def test_the_accepted_path_is_that_of_the_step(scored: tuple[TokenTree, Tensor]) -> None:
    tree, sampled = scored
    assert_walked(accept_path(tree, sampled), tree, sampled)


@drawn
@given(scored_trees(), st.data())
def test_a_truncated_tree_is_walked_as_far_as_it_goes(
    scored: tuple[TokenTree, Tensor], data: st.DataObject
) -> None:
    tree, sampled = scored
    requests, slots = sampled.shape
    sizes = data.draw(
        st.lists(st.integers(1, slots), min_size=requests, max_size=requests), label="sizes"
    )
    cut = tree.prefix(torch.tensor(sizes))
    assert_walked(accept_path(cut, sampled), cut, sampled)


@drawn
@given(scored_trees(), st.data())
def test_what_stands_in_unused_slots_is_not_read(
    scored: tuple[TokenTree, Tensor], data: st.DataObject
) -> None:
    tree, sampled = scored
    other = sampled.clone()
    for request, slot in (~tree.is_node).nonzero().tolist():
        other[request, slot] = data.draw(GARBAGE)
    first, second = accept_path(tree, sampled), accept_path(tree, other)
    assert torch.equal(first.output_tokens, second.output_tokens)
    assert torch.equal(first.num_sampled, second.num_sampled)
    assert torch.equal(first.path, second.path)
    assert torch.equal(first.last_node, second.last_node)


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_root_alone_yields_one_token(slots: int, dtype: torch.dtype) -> None:
    tree = batch([Nodes([ROOT], [0])] * 2, slots)
    sampled = torch.full((2, slots), -1, dtype=dtype)
    sampled[:, 0] = torch.tensor([7, ROOT])
    accepted = accept_path(tree, sampled)
    unused = [-1] * (slots - 1)
    assert accepted.output_tokens.tolist() == [[7, *unused], [ROOT, *unused]]
    assert accepted.num_sampled.tolist() == [1, 1]
    assert accepted.path.tolist() == [[0, *unused]] * 2
    assert accepted.last_node.tolist() == [0, 0]


def test_unused_slots_are_no_children_of_a_placeholder_token() -> None:
    """-1 is vLLM's placeholder for a token that is not there, and also fills unused slots."""
    tree = batch([Nodes([ROOT, 0, 1], [0, 0, 1])], 6)
    accepted = accept_path(tree, torch.full((1, 6), -1))
    assert accepted.output_tokens.tolist() == [[-1] * 6]
    assert accepted.num_sampled.tolist() == [1]
    assert accepted.path.tolist() == [[0, -1, -1, -1, -1, -1]]
    assert accepted.last_node.tolist() == [0]


def test_a_full_chain_can_be_accepted_whole() -> None:
    tokens = [ROOT, *range(127)]
    tree = batch([Nodes(tokens, [0, *range(127)])], 128)
    accepted = accept_path(tree, torch.arange(128).unsqueeze(0))
    assert accepted.output_tokens.tolist() == [list(range(128))]
    assert accepted.num_sampled.tolist() == [128]
    assert accepted.path.tolist() == [list(range(128))]
    assert accepted.last_node.tolist() == [127]


def test_matches_below_a_rejected_node_do_not_count() -> None:
    #   root ─ 0 ─ 1 ─ 2     the target samples 1 at the root, which no child carries
    tree = batch([Nodes([ROOT, 0, 1, 2], [0, 0, 1, 2])], 4)
    accepted = accept_path(tree, torch.tensor([[1, 1, 2, 0]]))
    assert accepted.output_tokens.tolist() == [[1, -1, -1, -1]]
    assert accepted.last_node.tolist() == [0]


# --- Losslessness: an exact enumeration of everything that the target may sample. ---

HORIZON = 3

Distribution = dict[Prefix, float]
Step = Callable[[Prefix], Distribution]
"""From the tokens so far to the distribution of the tokens that one decoding step adds."""


@dataclass(frozen=True)
class RandomModel:
    """A language model over VOCAB tokens: an arbitrary, but fixed, distribution per context."""

    seed: int

    def __call__(self, context: Prefix) -> list[float]:
        rng = random.Random(f"{self.seed} {context}")
        # Some tokens are impossible, some are likely.
        weights = [rng.choice([0, 1, 1, 3]) * rng.random() for _ in range(VOCAB)]
        weights[rng.randrange(VOCAB)] += 0.1
        return [weight / sum(weights) for weight in weights]


def first_tokens(step: Step, prefix: Prefix = ()) -> Distribution:
    """The distribution of the first HORIZON tokens that repeated steps produce."""
    if len(prefix) >= HORIZON:
        return {prefix[:HORIZON]: 1.0}
    total: Distribution = defaultdict(float)
    for output, probability in step(prefix).items():
        for tokens, rest in first_tokens(step, prefix + output).items():
            total[tokens] += probability * rest
    return total


def plain_decoding(target: RandomModel) -> Step:
    return lambda prefix: {(token,): p for token, p in enumerate(target(prefix))}


def tree_speculation(target: RandomModel, trees: Callable[[Prefix], Nodes]) -> Step:
    """One step with the package's scorer, over every assignment of sampled tokens to nodes."""

    def step(prefix: Prefix) -> Distribution:
        nodes = trees(prefix)
        contexts = naive.node_prefixes(nodes.tokens, nodes.parents, len(nodes))
        conditionals = [target(prefix + context) for context in contexts]
        assignments = list(itertools.product(range(VOCAB), repeat=len(nodes)))
        tree = batch([nodes] * len(assignments), len(nodes))
        accepted = accept_path(tree, torch.tensor(assignments))
        outputs: Distribution = defaultdict(float)
        for sampled, output, length in zip(
            assignments,
            accepted.output_tokens.tolist(),
            accepted.num_sampled.tolist(),
            strict=True,
        ):
            probability = 1.0
            for conditional, token in zip(conditionals, sampled, strict=True):
                probability *= conditional[token]
            outputs[tuple(output[:length])] += probability
        return outputs

    return step


def apple_speculation(target: RandomModel, drafter: RandomModel, beams: list[Prefix]) -> Step:
    """Apple's rule over beams of one length: every beam draws uniforms of its own, even for a
    prefix it shares, accepts a token while u < P / Q, and the longest accepted beam wins.
    """

    def step(prefix: Prefix) -> Distribution:
        length = len(beams[0])
        accept_probabilities = []
        for beam, i in itertools.product(beams, range(length)):
            p = target(prefix + beam[:i])[beam[i]]
            q = drafter(prefix + beam[:i])[beam[i]]
            accept_probabilities.append(min(1.0, p / q) if q else 1.0)
        outputs: Distribution = defaultdict(float)
        for draws in itertools.product([True, False], repeat=len(accept_probabilities)):
            probability = 1.0
            for accepted, p in zip(draws, accept_probabilities, strict=True):
                probability *= p if accepted else 1 - p
            if not probability:
                continue
            counts = []
            for first in range(0, len(draws), length):
                count = 0
                while count < length and draws[first + count]:
                    count += 1
                counts.append(count)
            longest = max(counts)
            path = beams[counts.index(longest)][:longest]
            last = target(prefix + path)
            if longest < length:
                drafted = drafter(prefix + path)
                last = [max(p - q, 0.0) for p, q in zip(last, drafted, strict=True)]
            for token, weight in enumerate(last):
                outputs[*path, token] += probability * weight / sum(last)
        return outputs

    return step


def worst_error(step: Step, target: RandomModel) -> float:
    """The largest error in the probability of any HORIZON tokens."""
    expected, found = first_tokens(plain_decoding(target)), first_tokens(step)
    sequences = itertools.product(range(VOCAB), repeat=HORIZON)
    return max(abs(expected.get(tokens, 0.0) - found.get(tokens, 0.0)) for tokens in sequences)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.data())
def test_whatever_the_trees_the_output_has_the_targets_distribution(
    seed: int, data: st.DataObject
) -> None:
    drawn_trees: dict[Prefix, Nodes] = {}

    def trees(prefix: Prefix) -> Nodes:
        if prefix not in drawn_trees:
            draws = st.tuples(st.integers(0, 10), st.integers(0, VOCAB - 1))
            nodes = data.draw(st.lists(draws, max_size=5), label=f"tree after {prefix}")
            drawn_trees[prefix] = Nodes.grow(nodes)
        return drawn_trees[prefix]

    target = RandomModel(seed)
    assert worst_error(tree_speculation(target, trees), target) < 1e-12


@pytest.mark.parametrize("beams", [[(0, 1)], [(0, 1), (0, 2)], [(0, 1), (1, 0), (2, 2)]])
def test_apples_rule_has_another_distribution(beams: list[Prefix]) -> None:
    """Negative control: the enumeration tells an exact rule from a biased one."""
    target, drafter = RandomModel(seed=1), RandomModel(seed=2)
    assert worst_error(apple_speculation(target, drafter, beams), target) > 0.01
    lossless = tree_speculation(target, lambda _: Nodes.grow([(0, beams[0][0]), (1, beams[0][1])]))
    assert worst_error(lossless, target) < 1e-12
