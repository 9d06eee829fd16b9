# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk follows what the target sampled, and loses nothing of its distribution."""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding_step import Node, walk
from redrafter_testing.algorithm import naive
from redrafter_testing.algorithm.naive import Prefix
from redrafter_testing.algorithm.random_trees import ROOT, VOCAB, scored_trees
from redrafter_testing.algorithm.tree_batches import grown_tree, token_trees
from vllm_redrafter.tree.acceptance import AcceptedPath, accept_path
from vllm_redrafter.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Nodes:
    """One tree: the root and its other nodes, parents before children."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def grow(cls, draws: Sequence[tuple[int, int]]) -> "Nodes":
        return cls(*grown_tree(draws, ROOT))

    def __len__(self) -> int:
        return len(self.tokens)


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


@settings(deadline=None, max_examples=150)
@given(scored_trees())
def test_the_accepted_path_is_that_of_the_step(scored: tuple[TokenTree, Tensor]) -> None:
    tree, sampled = scored
    assert_walked(accept_path(tree, sampled), tree, sampled)


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


def tree_speculation(target: RandomModel, trees: Callable[[Prefix], Nodes]) -> Step:
    """One step with the package's scorer, over every assignment of sampled tokens to nodes."""

    def step(prefix: Prefix) -> Distribution:
        nodes = trees(prefix)
        contexts = naive.node_prefixes(nodes.tokens, nodes.parents, len(nodes))
        conditionals = [target(prefix + context) for context in contexts]
        assignments = list(itertools.product(range(VOCAB), repeat=len(nodes)))
        count = len(assignments)
        tree = token_trees([nodes.parents] * count, len(nodes), [nodes.tokens] * count)
        accepted = accept_path(tree, torch.tensor(assignments))
        outputs: Distribution = defaultdict(float)
        columns = assignments, accepted.output_tokens.tolist(), accepted.num_sampled.tolist()
        for sampled, output, length in zip(*columns, strict=True):
            probabilities = [c[token] for c, token in zip(conditionals, sampled, strict=True)]
            outputs[tuple(output[:length])] += math.prod(probabilities)
        return outputs

    return step


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
    found = first_tokens(tree_speculation(target, trees))
    for tokens in itertools.product(range(VOCAB), repeat=HORIZON):
        plain = math.prod(target(tokens[:i])[token] for i, token in enumerate(tokens))
        assert abs(plain - found.get(tokens, 0.0)) < 1e-12
