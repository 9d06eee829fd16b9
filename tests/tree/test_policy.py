# SPDX-License-Identifier: Apache-2.0
"""What to draft for a step, and which of the nodes may be in its tree."""

from typing import get_args

import pytest
import torch

from vllm_redrafter.config import ReDrafterConfig, TreeKind
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.tree.policy import (
    allowed_nodes,
    candidate_log_probs,
    on_best_path,
    search_shape,
)


@pytest.mark.parametrize(
    ("max_nodes", "shape"),
    [
        (4, (1, 4)),  # fewer than a beam is long
        (5, (3, 5)),
        (12, (3, 5)),
    ],
)
def test_a_step_of_few_nodes_drafts_the_best_beam_alone(
    max_nodes: int, shape: tuple[int, int]
) -> None:
    assert search_shape(ReDrafterConfig(12, beam_width=3, beam_length=5), max_nodes) == shape


@pytest.fixture
def explored() -> ExploredNodes:
    """One request, two levels of three beams; both finished beams grew from beam 1."""
    return ExploredNodes(
        tokens=torch.arange(6).view(1, 2, 3),
        back_pointers=torch.tensor([[[0, 0, 0], [1, 1, 0]]]),
        log_probs=torch.tensor([[[-0.1, -0.2, -0.3], [-0.4, -0.5, -torch.inf]]]),
    )


def test_trees_of_beams_leave_out_what_no_finished_beam_passes_through(
    explored: ExploredNodes,
) -> None:
    kept = candidate_log_probs(explored, "beams") > -torch.inf
    assert kept.tolist() == [[[False, True, False], [True, True, False]]]


def test_a_chain_is_the_path_of_which_the_most_tokens_are_expected(
    explored: ExploredNodes,
) -> None:
    found = explored.back_pointers, explored.log_probs
    kept = on_best_path(*found)
    assert kept.isfinite().tolist() == [[[False, True, False], [True, False, False]]]
    assert torch.equal(kept[kept.isfinite()], torch.tensor([-0.2, -0.4]))
    # The best node of the first level, which nothing grew from, is worth more than both.
    explored.log_probs[0, 1] -= 3
    assert on_best_path(*found).isfinite().nonzero().tolist() == [[0, 0, 0]]


def test_no_node_is_on_the_best_path_where_there_is_none() -> None:
    none = torch.full((2, 3, 2), -torch.inf)
    assert torch.equal(on_best_path(torch.full((2, 3, 2), 99), none), none)


@pytest.mark.parametrize("tree", get_args(TreeKind))
def test_where_a_policy_allows_a_node_it_allows_its_parent(tree: TreeKind) -> None:
    torch.manual_seed(0)
    # Fewer tokens than beams: some beams are missing, and some have no children.
    drafter = RecurrentHead(RecurrentConfig(vocab_size=3, hidden_size=6, exit_dim=12))
    embedding = torch.randn(3, 6).__getitem__
    hidden, roots = torch.randn(9, 6), torch.zeros(9, dtype=torch.int64)
    explored = beam_search(drafter, embedding, hidden, roots, beam_width=5, beam_length=4)
    allowed = allowed_nodes(explored, tree)
    if allowed is None:
        return
    assert allowed.dtype == torch.bool
    for level in range(1, 4):
        of_parents = allowed[:, level - 1].gather(1, explored.back_pointers[:, level])
        assert of_parents[allowed[:, level]].all()
