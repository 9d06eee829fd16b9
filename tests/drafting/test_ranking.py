# SPDX-License-Identifier: Apache-2.0
"""The compiled ranking against the torch functions that say what it computes."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from redrafter_testing.algorithm.budgets import best_trim
from redrafter_testing.algorithm.context_matches import joined, search_and_paths
from redrafter_testing.algorithm.random_trees import random_search
from redrafter_testing.algorithm.tree_batches import first_nodes
from vllm_redrafter.budget.acceptance import AcceptanceEstimator, log_odds_of
from vllm_redrafter.budget.choice import VerifyCosts, verify_everything
from vllm_redrafter.config import TreeKind
from vllm_redrafter.drafting.joining import DraftNodes
from vllm_redrafter.drafting.ranking import best_trees
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import MATCH_CLASSES
from vllm_redrafter.tree.policy import candidate_log_probs
from vllm_redrafter.tree.token_tree import TokenTree

MAX_NODES = 12


def draft_nodes(explored: ExploredNodes) -> DraftNodes:
    """Without matches."""
    parts = [part.numpy() for part in vars(explored).values()]
    return DraftNodes(*parts, np.zeros(parts[0].shape, dtype=np.int64))


def rank(nodes: DraftNodes, calibration: Any, **given: Any) -> tuple[TokenTree, tuple[Any, ...]]:
    """The trees of `best_trees`, of all nodes unless it is said; and the rest."""
    requests = len(nodes.tokens)
    found = best_trees(
        np.arange(requests),
        nodes,
        given.get("sampled", np.zeros(requests, dtype=np.bool_)),
        calibration,
        given.get("request_nodes", np.full(requests, MAX_NODES)),
        MAX_NODES,
        given.get("costs", verify_everything(requests * (MAX_NODES + 1))),
        given.get("chains", np.zeros(requests, dtype=np.bool_)),
    )
    return TokenTree(*map(torch.from_numpy, found[:4])), found[4:]


def assert_same(found: TokenTree, expected: TokenTree) -> None:
    for field in fields(TokenTree):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name)), field.name


@pytest.mark.parametrize("tree", ["explored", "beams"])
@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize(("requests", "length", "width"), [(1, 1, 1), (3, 5, 3), (8, 4, 6)])
def test_trees_and_probabilities_are_those_of_the_torch_functions(
    tree: TreeKind, chains: bool, requests: int, length: int, width: int
) -> None:
    explored, roots = random_search(requests, length, width), torch.arange(requests)
    chain = roots % 2 == 0 if chains else torch.zeros(requests, dtype=torch.bool)
    # Those that sample have an acceptance model of their own, and a model knows more levels.
    sampled = roots % 3 == 1
    slopes = torch.tensor([0.4, 0.8])
    biases = torch.linspace(-0.5, 0.5, 2 * (length + 1)).view(2, length + 1)
    request_nodes = roots * 3 % (MAX_NODES + 1)

    log_odds = log_odds_of(explored.log_probs, explored.back_pointers)
    log_survival = torch.empty_like(log_odds)
    for kind in (0, 1):
        model = AcceptanceEstimator(length)
        model.slope.fill_(slopes[kind])
        model.biases.copy_(biases[kind, :length])
        of_kind = sampled == bool(kind)
        parts = log_odds, explored.log_probs, explored.back_pointers
        log_survival[of_kind] = model.log_survival(*(part[of_kind] for part in parts))
    ranked = replace(explored, log_probs=log_survival)
    expected = TokenTree.from_explored(roots, ranked, MAX_NODES, tree, chain)
    expected = first_nodes(expected, request_nodes + 1)
    # The same trees, with each node's index for its token.
    indices = torch.arange(length * width).view(1, length, width).expand_as(explored.tokens)
    marked = replace(ranked, tokens=indices)
    index = TokenTree.from_explored(roots, marked, MAX_NODES, tree, chain).tokens[:, 1:]

    allowed = candidate_log_probs(explored, tree)
    found, (node_log_odds, lengths, survival, visited, tokens, _) = rank(
        draft_nodes(replace(explored, log_probs=allowed)),
        (slopes.numpy(), biases.numpy(), np.zeros((2, MATCH_CLASSES, length), np.float32)),
        sampled=sampled.numpy(),
        request_nodes=request_nodes.numpy(),
        chains=chain.numpy(),
    )
    assert_same(found, expected)
    assert not lengths.any()
    assert tokens == pytest.approx(float(survival[:, 1:].sum() + (found.num_nodes > 1).sum()))
    may_be = log_survival.masked_fill(allowed == -torch.inf, -torch.inf).exp()
    assert np.allclose(visited, may_be, atol=1e-6)

    def of_nodes(values: Tensor) -> Tensor:
        kept = values.flatten(1).gather(1, index.long().clamp(min=0))
        return kept.masked_fill(~expected.is_node[:, 1:], 0.0)

    assert np.allclose(node_log_odds[:, 1:], of_nodes(log_odds), atol=1e-5)
    assert np.allclose(survival[:, 1:], of_nodes(log_survival.exp()), atol=1e-6)
    assert (survival[:, 0] == 1).all() and (node_log_odds[:, 0] == 0).all()


def test_a_parent_comes_before_a_child_that_is_as_probable() -> None:
    """Certain tokens: log-probabilities of 0, whose log-odds are bounded."""
    zeros = torch.zeros(1, 4, 1)
    certain = draft_nodes(ExploredNodes(zeros.long(), zeros.long(), zeros))
    slopes, biases = np.array([100.0, 1.0], np.float32), np.zeros((2, 4), np.float32)
    found, _ = rank(certain, (slopes, biases, np.zeros((2, MATCH_CLASSES, 4), np.float32)))
    assert found.parents[0, :5].tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("least", [0, 5])
@pytest.mark.parametrize("row", [0.001, 0.03, 0.1, 10.0])
@pytest.mark.parametrize("chain", [0.8, 1.0, 1.5])
def test_trees_or_chains_have_the_first_nodes_of_each_request_that_are_worth_verifying(
    chain: float, row: float, least: int
) -> None:
    requests, length = 8, 4
    nodes, sampled = draft_nodes(random_search(requests, length, 6)), np.arange(requests) % 3 == 1
    of_trees = 1.0 + row * np.arange(requests * (MAX_NODES + 1) + 1)
    costs = VerifyCosts(np.array([0.9, 0.6]), 0.2, of_trees, chain * of_trees, least)
    no_matches = np.zeros((2, MATCH_CLASSES, length), np.float32)
    calibration = np.array([0.4, 0.8], np.float32), np.zeros((2, length), np.float32), no_matches
    options = []
    for are_chains, seconds in ((True, costs.chain_seconds), (False, costs.tree_seconds)):
        given = {"sampled": sampled, "chains": np.full(requests, are_chains)}
        whole, rest = rank(nodes, calibration, **given)
        kept, choice = best_trim(rest[2][:, 1:], sampled, costs._replace(tree_seconds=seconds))
        options.append((choice.tokens_per_second, whole, rest, kept, choice))
    # An exploration verifies trees.
    better = options[1] if least else max(options, key=lambda option: option[0])
    _, whole, (all_log_odds, _, all_survival, visited, *_), kept, choice = better
    found, (log_odds, _, survival, explored, expected, rate) = rank(
        nodes, calibration, sampled=sampled, costs=costs
    )
    assert_same(found, first_nodes(whole, torch.from_numpy(kept + 1)))
    if not least:
        assert rate == pytest.approx(choice.tokens_per_second)
    is_kept = np.arange(MAX_NODES + 1) <= kept[:, None]
    assert np.array_equal(log_odds, np.where(is_kept, all_log_odds, 0.0))
    assert np.array_equal(survival, np.where(is_kept, all_survival, 0.0))
    assert np.array_equal(explored, visited)
    assert expected == pytest.approx(choice.tokens - requests + np.count_nonzero(kept))
    # The counters that it is added to are sent to other processes, which no number of numpy's can.
    assert type(expected) is float


@pytest.mark.parametrize("seed", range(6))
def test_a_node_of_both_sources_is_as_probable_as_the_more_confident_one_says(seed: int) -> None:
    explored, matches = search_and_paths(seed)
    requests, length, width = explored.tokens.shape
    depth = matches.tokens.shape[2]
    both, match_classes = joined(explored, matches)
    nodes = DraftNodes(*(part.numpy() for part in (*vars(both).values(), match_classes)))
    sampled, levels = np.arange(requests) % 2 == 1, max(length, depth)
    slopes = np.array([0.4, 0.8], dtype=np.float32)
    biases = np.linspace(-0.5, 0.5, 2 * levels, dtype=np.float32).reshape(2, levels)
    generator = np.random.default_rng(seed)
    probabilities = generator.random((2, MATCH_CLASSES, levels), dtype=np.float32)
    calibration = slopes, biases, probabilities
    trees, (log_odds, lengths, survival, of_search, *_) = rank(nodes, calibration, sampled=sampled)
    for r in range(requests):
        kind = int(sampled[r])
        assert (np.diff(survival[r, : trees.num_nodes[r]]) <= 1e-6).all()
        for node in range(1, int(trees.num_nodes[r])):
            level, above = int(trees.depths[r, node]) - 1, survival[r, trees.parents[r, node]]
            by_draft, by_match = 0.0, 0.0
            if log_odds[r, node] > -np.inf:
                f = slopes[kind] * log_odds[r, node] + biases[kind, level]
                by_draft = 1.0 / (1.0 + np.exp(-f))
            if lengths[r, node]:
                by_match = probabilities[kind, lengths[r, node] - 1, level]
            assert by_draft or by_match
            assert survival[r, node] == pytest.approx(above * max(by_draft, by_match), rel=1e-4)
    # What the search alone would be expected to bring.
    _, (*_, alone, _, _) = rank(draft_nodes(explored), calibration, sampled=sampled)
    assert of_search[:, :length, :width] == pytest.approx(alone)
    assert not of_search[:, length:].any() and not of_search[:, :, width:].any()
