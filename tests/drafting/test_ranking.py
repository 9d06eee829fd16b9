# SPDX-License-Identifier: Apache-2.0
"""The compiled ranking against the torch functions that say what it computes."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from redrafter_testing.algorithm.trimming import best_trim
from vllm_redrafter.budget.acceptance import AcceptanceEstimator, log_odds_of
from vllm_redrafter.budget.choice import VerifyCosts, verify_everything
from vllm_redrafter.config import TreeKind
from vllm_redrafter.drafting.joining import joined_nodes
from vllm_redrafter.drafting.ranking import best_trees, on_best_path
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import LONGEST_MATCH, ContextMatches, joined
from vllm_redrafter.tree.policy import candidate_log_probs
from vllm_redrafter.tree.token_tree import TokenTree, select_nodes

Array = npt.NDArray[Any]
MAX_NODES = 12


def search(seed: int, requests: int, length: int, width: int) -> ExploredNodes:
    """As a beam search finds them: children below their parents, some beams missing."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 1000, (requests, length, width), generator=random)
    back_pointers = torch.randint(0, width, (requests, length, width), generator=random)
    back_pointers[:, 0] = 0
    given_parent = torch.rand(requests, length, width, generator=random).log()
    log_probs = given_parent.clone()
    for level in range(1, length):
        above = log_probs[:, level - 1].gather(1, back_pointers[:, level])
        log_probs[:, level] += above
    if width > 2:
        log_probs[0, 0, 2] = -torch.inf
        # Nothing grows from what is not there.
        for level in range(1, length):
            above = log_probs[:, level - 1].gather(1, back_pointers[:, level])
            log_probs[:, level] = log_probs[:, level].masked_fill(above == -torch.inf, -torch.inf)
    return ExploredNodes(tokens, back_pointers, log_probs)


def estimator_of(slope: Tensor, biases: Tensor) -> AcceptanceEstimator:
    made = AcceptanceEstimator(len(biases))
    made.slope.fill_(slope)
    made.biases.copy_(biases)
    return made


def no_matches(explored: ExploredNodes) -> Array:
    return np.zeros(explored.tokens.shape, dtype=np.int64)


def no_probabilities(length: int) -> Array:
    return np.zeros((2, LONGEST_MATCH, length), dtype=np.float32)


@pytest.mark.parametrize("tree", ["explored", "beams"])
@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("less", [False, True], ids=["all", "less"])
@pytest.mark.parametrize(("requests", "length", "width"), [(1, 1, 1), (3, 5, 3), (8, 4, 6)])
def test_trees_and_probabilities_are_those_of_the_torch_functions(
    tree: TreeKind, chains: bool, less: bool, requests: int, length: int, width: int
) -> None:
    explored = search(requests, requests, length, width)
    roots = torch.arange(requests)
    chain = torch.arange(requests) % 2 == 0 if chains else None
    # Those that sample have an acceptance model of their own, and a model knows more levels.
    sampled = torch.arange(requests) % 3 == 1
    slopes = torch.tensor([0.4, 0.8])
    biases = torch.linspace(-0.5, 0.5, 2 * (length + 1)).view(2, length + 1)
    most = (
        torch.arange(requests) * 3 % (MAX_NODES + 1) if less else torch.full((requests,), MAX_NODES)
    )

    log_odds = log_odds_of(explored.log_probs, explored.back_pointers)
    log_survival = torch.cat(
        [
            estimator_of(slopes[kind], biases[kind, :length]).log_survival(
                log_odds[r : r + 1],
                explored.log_probs[r : r + 1],
                explored.back_pointers[r : r + 1],
            )
            for r, kind in enumerate(sampled.long())
        ]
    )
    ranked = replace(explored, log_probs=log_survival)
    expected, index = select_nodes(roots, ranked, MAX_NODES, tree, chain)
    expected = expected.prefix(most.int() + 1)

    allowed = candidate_log_probs(explored, tree)
    *arrays, expected_tokens = best_trees(
        roots.numpy(),
        explored.tokens.numpy(),
        explored.back_pointers.numpy(),
        allowed.numpy(),
        no_matches(explored),
        sampled.numpy(),
        slopes.numpy(),
        biases.numpy(),
        no_probabilities(length),
        most.numpy(),
        MAX_NODES,
        *verify_everything(requests * (MAX_NODES + 1)),
        np.zeros(requests, dtype=np.bool_) if chain is None else chain.numpy(),
    )
    tokens, parents, depths, num_nodes, node_log_odds, lengths, survival, _, all_survival = map(
        torch.from_numpy, arrays
    )
    assert not lengths.any()
    assert expected_tokens == pytest.approx(float(survival[:, 1:].sum() + (num_nodes > 1).sum()))
    assert torch.equal(num_nodes, expected.num_nodes)
    assert torch.equal(tokens, expected.tokens)
    assert torch.equal(parents, expected.parents)
    assert torch.equal(depths, expected.depths)
    may_be = log_survival.masked_fill(allowed == -torch.inf, -torch.inf).exp()
    assert torch.allclose(all_survival, may_be, atol=1e-6)

    def of_nodes(values: Tensor) -> Tensor:
        return values.flatten(1).gather(1, index).masked_fill(~expected.is_node[:, 1:], 0.0)

    assert torch.allclose(node_log_odds[:, 1:], of_nodes(log_odds), atol=1e-5)
    assert torch.allclose(survival[:, 1:], of_nodes(log_survival.exp()), atol=1e-6)
    assert (survival[:, 0] == 1).all()
    assert (node_log_odds[:, 0] == 0).all()


def test_a_parent_comes_before_a_child_that_is_as_probable() -> None:
    """Certain tokens: log-probabilities of 0, whose log-odds are bounded."""
    certain = ExploredNodes(
        torch.arange(4).view(1, 4, 1),
        torch.zeros(1, 4, 1, dtype=torch.int64),
        torch.zeros(1, 4, 1),
    )
    _, parents, depths, *_ = best_trees(
        torch.zeros(1, dtype=torch.int64).numpy(),
        certain.tokens.numpy(),
        certain.back_pointers.numpy(),
        certain.log_probs.numpy(),
        no_matches(certain),
        torch.zeros(1, dtype=torch.bool).numpy(),
        torch.tensor([100.0, 1.0]).numpy(),
        torch.zeros(2, 4).numpy(),
        no_probabilities(4),
        torch.tensor([4]).numpy(),
        4,
        *verify_everything(5),
        np.zeros(1, dtype=np.bool_),
    )
    assert parents.tolist() == [[0, 0, 1, 2, 3]]
    assert depths.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("least", [0, 1, 5])
@pytest.mark.parametrize("row", [0.001, 0.03, 0.1, 10.0])
@pytest.mark.parametrize(("requests", "length", "width"), [(1, 1, 1), (3, 5, 3), (8, 4, 6)])
def test_trees_have_the_first_nodes_of_each_request_that_are_worth_verifying(
    requests: int, length: int, width: int, row: float, least: int
) -> None:
    explored = search(requests, requests, length, width)
    sampled = np.arange(requests) % 3 == 1
    rows = requests * (MAX_NODES + 1)
    verify_costs = VerifyCosts(0.9, 0.6, 0.2, 1.0 + row * np.arange(rows + 1), 0.9, least)

    def trees(verify_costs: VerifyCosts) -> tuple[Any, ...]:
        return best_trees(
            np.arange(requests),
            explored.tokens.numpy(),
            explored.back_pointers.numpy(),
            explored.log_probs.numpy(),
            no_matches(explored),
            sampled,
            np.array([0.4, 0.8], dtype=np.float32),
            np.zeros((2, length), dtype=np.float32),
            no_probabilities(length),
            np.full(requests, MAX_NODES),
            MAX_NODES,
            *verify_costs,
            np.zeros(requests, dtype=np.bool_),
        )

    *whole, all_log_odds, _, all_survival, all_probable, visited, _ = trees(verify_everything(rows))
    *found, log_odds, _, survival, probable, explored_too, expected = trees(verify_costs)
    ratio = np.where(sampled, verify_costs.sampled_ratio, verify_costs.greedy_ratio)[:, None]
    assert probable == pytest.approx(all_probable * ratio)
    nodes, choice = best_trim(all_survival[:, 1:], sampled, verify_costs)
    prefix = TokenTree(*map(torch.from_numpy, whole)).prefix(torch.from_numpy(nodes + 1).int())
    for field, array in zip(fields(TokenTree), found, strict=True):
        assert np.array_equal(array, getattr(prefix, field.name).numpy())
    is_kept = np.arange(MAX_NODES + 1) <= nodes[:, None]
    assert np.array_equal(log_odds, np.where(is_kept, all_log_odds, 0.0))
    assert np.array_equal(survival, np.where(is_kept, all_survival, 0.0))
    assert np.array_equal(explored_too, visited)
    assert expected == pytest.approx(choice.tokens - requests + np.count_nonzero(nodes))
    # The counters that it is added to are sent to other processes, which no number of numpy's can.
    assert type(expected) is float


@pytest.mark.parametrize("seed", range(6))
def test_a_node_that_is_on_a_path_too_is_as_probable_as_the_more_confident_source_says(
    seed: int,
) -> None:
    requests, length, width, num_paths, depth = 4, 3, 3, 2, 5
    explored = search(seed, requests, length, width)
    explored.tokens[:] %= 4
    random = torch.Generator().manual_seed(seed)
    paths = torch.randint(4, (requests, num_paths, depth), generator=random)
    paths[:, 1, 0] = (paths[:, 0, 0] + 1) % 4
    matches = ContextMatches(paths, torch.randint(6, (requests, num_paths), generator=random))
    expected = joined(explored, matches)
    arrays = [part.numpy() for part in vars(explored).values()]
    found = joined_nodes(*arrays, paths.numpy(), matches.lengths.numpy())
    for array, part in zip(
        found, (*vars(expected.explored).values(), expected.match_lengths), strict=True
    ):
        is_node = expected.is_node.numpy()
        assert np.array_equal(array[is_node], part.numpy()[is_node])

    sampled = np.arange(requests) % 2 == 1
    slopes = np.array([0.4, 0.8], dtype=np.float32)
    biases = np.linspace(-0.5, 0.5, 2 * depth, dtype=np.float32).reshape(2, depth)
    probabilities = torch.rand(2, LONGEST_MATCH, depth, generator=random).numpy()
    most = np.full(requests, MAX_NODES)
    verify_costs = verify_everything(requests * (MAX_NODES + 1))
    calibration = slopes, biases, probabilities
    roots, trees = np.arange(requests), np.zeros(requests, dtype=np.bool_)
    *tree, log_odds, lengths, survival, _, of_search, _ = best_trees(
        roots, *found, sampled, *calibration, most, MAX_NODES, *verify_costs, trees
    )
    _, parents, depths, num_nodes = tree
    for r in range(requests):
        kind = int(sampled[r])
        assert (np.diff(survival[r, : num_nodes[r]]) <= 1e-6).all()
        for node in range(1, num_nodes[r]):
            level, above = depths[r, node] - 1, survival[r, parents[r, node]]
            by_draft, by_match = 0.0, 0.0
            if log_odds[r, node] > -np.inf:
                f = slopes[kind] * log_odds[r, node] + biases[kind, level]
                by_draft = 1.0 / (1.0 + np.exp(-f))
            if lengths[r, node]:
                by_match = probabilities[kind, lengths[r, node] - 1, level]
            assert by_draft or by_match
            assert survival[r, node] == pytest.approx(above * max(by_draft, by_match), rel=1e-4)
    # What the search alone would be expected to bring.
    alone = best_trees(
        roots,
        *arrays,
        no_matches(explored),
        sampled,
        *calibration,
        most,
        MAX_NODES,
        *verify_costs,
        trees,
    )[-2]
    assert of_search[:, :length, :width] == pytest.approx(alone)
    assert not of_search[:, length:].any() and not of_search[:, :, width:].any()


@pytest.mark.parametrize("seed", range(6))
def test_the_best_path_is_the_one_of_which_the_most_tokens_are_expected(seed: int) -> None:
    explored = search(seed, requests=4, length=4, width=3)
    pointers, scores = explored.back_pointers.numpy(), explored.log_probs.numpy()

    def path_to(r: int, level: int, beam: int) -> list[tuple[int, int]]:
        above = path_to(r, level - 1, pointers[r, level, beam]) if level else []
        return [*above, (level, beam)]

    kept = on_best_path(pointers, scores, np.array([True, True, False, True]))
    assert np.array_equal(kept[2], scores[2])
    for r in (0, 1, 3):
        paths = [path_to(r, *node) for node in np.ndindex(4, 3) if scores[r][node] > -np.inf]
        best = max(paths, key=lambda path: sum(np.exp(scores[r][node]) for node in path))
        assert [tuple(node) for node in np.argwhere(kept[r] > -np.inf)] == best
        assert all(kept[r][node] == scores[r][node] for node in best)


def test_no_node_is_on_the_best_path_where_there_is_none() -> None:
    none = np.full((1, 3, 2), -np.inf, dtype=np.float32)
    chains = np.ones(1, dtype=np.bool_)
    assert np.array_equal(on_best_path(np.zeros((1, 3, 2), dtype=np.int64), none, chains), none)
