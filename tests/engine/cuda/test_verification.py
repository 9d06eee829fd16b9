"""What the walk says of a tree's nodes, as the acceptance estimator learns from it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_redrafter.engine.cuda.verification import Verification, cache_tables

# Nodes 1 and 2 are children of the root, 3 of node 1, 4 of node 3, 5 of node 2.
PARENTS = [0, 0, 0, 1, 3, 2]


def verification(path: list[int], num_nodes: int, tokens: list[int] | None = None) -> Verification:
    made = Verification(2, len(PARENTS) - 1, torch.device("cpu"))
    made.staged.parents[0] = torch.tensor(PARENTS)
    made.staged.tokens[0] = torch.tensor(tokens or [7] * len(PARENTS))
    made.staged.num_nodes[0] = num_nodes
    made.path[0] = torch.tensor(path + [-1] * (len(PARENTS) - len(path)))
    # A request that is no tree.
    made.staged.tokens[1], made.path[1], made.staged.num_nodes[1] = 7, -1, 1
    made.path[1, 0] = 0
    made.note_verified(2, 2)
    return made


def nodes(mask: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in mask]


@pytest.mark.parametrize(
    ("path", "num_nodes", "judged"),
    [
        ([0], 6, [1, 2]),
        ([0, 1], 6, [1, 2, 3]),
        ([0, 1, 3, 4], 6, [1, 2, 3, 4]),
        ([0, 2], 6, [1, 2, 5]),
        ([0, 1], 3, [1, 2]),
        ([0], 1, []),
    ],
)
def test_nodes_are_judged_that_were_verified_below_an_accepted_one(
    path: list[int], num_nodes: int, judged: list[int]
) -> None:
    found, accepted = verification(path, num_nodes).judged(2)
    assert nodes(found) == [judged, []]
    assert nodes(accepted) == [path, [0]]


def test_where_nothing_was_verified_nothing_is_judged() -> None:
    """What is staged and walked there is of an earlier step."""
    step = verification([0, 1], 6)
    step.note_verified(0, 2)
    assert nodes(step.judged(2)[0]) == [[], []]


def test_a_node_that_its_grammar_was_not_asked_about_is_not_judged() -> None:
    found, _ = verification([0], 6, [7, 7, -1, 7, 7, 7]).judged(1)
    assert nodes(found) == [[1]]


def test_a_cache_that_layers_share_is_moved_once_and_caches_may_differ_in_shape() -> None:
    local, wide = (torch.zeros(3, 1, 32, 2 * size) for size in (256, 512))
    tables = cache_tables([local, wide, local, wide, wide])
    moved = sorted(table.bases.tolist() for table in tables)
    assert moved == sorted([[local.data_ptr()], [wide.data_ptr()]])
