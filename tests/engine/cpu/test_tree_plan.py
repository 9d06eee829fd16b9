# SPDX-License-Identifier: Apache-2.0
"""No more is copied for trees than they need; that it suffices is test_tree_sequences.py's."""

import numpy as np
import pytest

from redrafter_testing.algorithm.tree_batches import chain, star, token_trees
from vllm_redrafter.engine.cpu.tree_plan import plan_sequences
from vllm_redrafter.utils.compiled import Array

UNIT, BLOCK_SIZE = 4, 16


def plan(
    parents: list[int],
    context: int,
    requests: int = 1,
    first_row: int = 0,
    window: int = -1,
    most_copies: int = 10**6,
) -> tuple[Array, ...]:
    """Of requests with the same tree, whose blocks and rows follow one another."""
    tree = token_trees([parents] * requests, len(parents))
    blocks = -(-(context + len(parents)) // BLOCK_SIZE)
    return plan_sequences(
        tree.num_nodes.numpy(),
        tree.parents.numpy(),
        tree.depths.numpy(),
        first_row + len(parents) * np.arange(requests),
        np.full(requests, context),
        np.arange(requests * blocks, dtype=np.int32).reshape(requests, blocks),
        BLOCK_SIZE,
        UNIT,
        window,
        most_copies,
    )


def test_nodes_in_line_with_the_root_share_its_sequence_and_its_copy() -> None:
    """Nodes 1 and 2 are a line; 3 and 4 begin paths of their own."""
    ends, bounds, lengths, table, copies, sources, targets = plan([0, 0, 1, 0, 1], 8, first_row=7)
    assert bounds.tolist() == [7, 10, 11, 12]
    assert lengths.tolist() == [11, 10, 11]
    # Two units of context, and one for each of three leaves, the last leaf's first.
    assert ends.tolist() == [[3, 5, 2]]
    assert table.tolist() == [[0, 1, 4], [0, 1, 3], [0, 1, 2]]
    assert sources.tolist() == [[0, 12], [0, 11]]
    assert targets.tolist() == [[2, 2], [3, 1]]
    assert len(copies) == 5


@pytest.mark.parametrize(("window", "units"), [(-1, 101), (10, 4)])
def test_hidden_units_are_not_copied(window: int, units: int) -> None:
    """In a window of 10 the root sees positions 391 on, of which 388 begins a unit."""
    assert len(plan(chain(3), 400, window=window)[4]) == units


@pytest.mark.parametrize(("most_copies", "parts"), [(1, 3), (10, 2), (12, 1)])
def test_a_part_copies_no_more_than_it_may_unless_it_is_one_request(
    most_copies: int, parts: int
) -> None:
    assert len(plan(star(2), 8, requests=3, most_copies=most_copies)[0]) == parts
