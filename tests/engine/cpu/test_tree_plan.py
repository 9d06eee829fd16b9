# SPDX-License-Identifier: Apache-2.0
"""The sequences that trees are laid out as: what each of them reads, token by token."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter_testing.algorithm.tree_batches import bushy, chain, star, token_trees
from vllm_redrafter.engine.cpu.tree_plan import Array, plan_sequences

UNIT = 4
STALE = -(2**30)
"""In the block table behind a request's own blocks: whoever reads it leaves the cache."""


class Batch:
    """Requests with a tree each, whose blocks lie in no order; rows of others between some."""

    def __init__(
        self, requests: list[tuple[int, list[int]]], block_size: int, gaps: list[int]
    ) -> None:
        self.requests, self.block_size = requests, block_size
        nodes = [len(parents) for _, parents in requests]
        self.tree = token_trees([parents for _, parents in requests], max(nodes) + 2)
        ends = np.cumsum([gap + count for gap, count in zip(gaps, nodes, strict=True)])
        self.root_rows = (ends - nodes).astype(np.int64)
        used = [
            -(-(n + count) // block_size) for (n, _), count in zip(requests, nodes, strict=True)
        ]
        free = random.Random(0).sample(range(sum(used)), sum(used))
        self.table = np.full((len(requests), max(used) + 1), STALE, dtype=np.int32)
        for r, blocks in enumerate(used):
            self.table[r, :blocks] = [free.pop() for _ in range(blocks)]

    def plan(self, window: int = -1, most_copies: int = 10**6) -> tuple[Array, ...]:
        return plan_sequences(
            self.tree.num_nodes.numpy(),
            self.tree.parents.numpy(),
            self.tree.depths.numpy(),
            self.root_rows,
            np.array([n for n, _ in self.requests]),
            self.table,
            self.block_size,
            UNIT,
            window,
            most_copies,
        )

    def slot(self, request: int, position: int) -> tuple[int, int]:
        """Block and place of one of the request's linear slots."""
        block = int(self.table[request, position // self.block_size])
        return block, position % self.block_size

    def read_by(self, request: int, node: int) -> list[tuple[int, int]]:
        """The slots that a node sees, in the order of their positions."""
        n, parents = self.requests[request]
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        return [self.slot(request, at) for at in [*range(n), *(n + node for node in path)]]


def laid_out(batch: Batch, window: int, most_copies: int) -> dict[int, list[tuple[int, int]]]:
    """By row, the slots that it reads, as a causal kernel would go by the plan."""
    ends, bounds, lengths, table, copies, sources, targets = batch.plan(window, most_copies)
    found: dict[int, list[tuple[int, int]]] = {}
    begin = [0, 0, 0]
    for part, end in enumerate(ends.tolist()):
        units = [
            [(block, place * UNIT + token) for token in range(UNIT)]
            for block, place in copies[begin[1] : end[1]].tolist()
        ]
        moves = zip(sources[begin[2] : end[2]].tolist(), targets[begin[2] : end[2]], strict=True)
        for source, (unit, place) in moves:
            units[unit][place] = tuple(source)
        for sequence in range(begin[0], end[0]):
            first, behind = bounds[sequence + part], bounds[sequence + part + 1]
            length = lengths[sequence]
            keys = [units[table[sequence, at // UNIT]][at % UNIT] for at in range(length)]
            for row in range(first, behind):
                assert row not in found
                found[row] = keys[: length - (behind - 1 - row)]
        begin = end
    return found


REQUESTS = st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 99))


@settings(deadline=None, max_examples=200)  # the first call compiles
@given(
    sizes=st.lists(REQUESTS, min_size=1, max_size=5),
    block_size=st.sampled_from([UNIT, 4 * UNIT]),
    window=st.sampled_from([-1, 1, 2, 7, 16, 1000]),
    most_copies=st.sampled_from([0, 20, 10**6]),
    gaps=st.lists(st.sampled_from([0, 0, 3]), min_size=5, max_size=5),
)
def test_every_node_reads_its_context_its_ancestors_and_itself(
    sizes: list[tuple[int, int, int]],
    block_size: int,
    window: int,
    most_copies: int,
    gaps: list[int],
) -> None:
    requests = [(n, bushy(nodes, seed)) for n, nodes, seed in sizes]
    batch = Batch(requests, block_size, gaps[: len(sizes)])
    found = laid_out(batch, window, most_copies)
    assert len(found) == sum(nodes for _, nodes, _ in sizes)
    for request, (_, parents) in enumerate(requests):
        for node in range(len(parents)):
            expected = batch.read_by(request, node)
            seen = len(expected) if window < 0 else min(window, len(expected))
            row = int(batch.root_rows[request]) + node
            assert found[row][-seen:] == expected[-seen:]
            assert len(found[row]) == len(expected)


def test_nodes_in_line_with_the_root_share_its_sequence_and_its_copy() -> None:
    """Nodes 1 and 2 are a line; 3 and 4 begin paths of their own."""
    batch = Batch([(8, [0, 0, 1, 0, 1])], 16, [7])
    ends, bounds, lengths, table, copies, sources, targets = batch.plan()
    assert bounds.tolist() == [7, 10, 11, 12]
    assert lengths.tolist() == [11, 10, 11]
    # Two units of context, and one for each of three leaves, the last leaf's first.
    assert ends.tolist() == [[3, 5, 2]]
    assert table.tolist() == [[0, 1, 4], [0, 1, 3], [0, 1, 2]]
    assert [tuple(source) for source in sources] == [batch.slot(0, 12), batch.slot(0, 11)]
    assert targets.tolist() == [[2, 2], [3, 1]]
    assert len(copies) == 5


def test_hidden_units_are_not_copied() -> None:
    everything = Batch([(400, chain(3))], 16, [0]).plan()
    windowed = Batch([(400, chain(3))], 16, [0]).plan(window=10)
    assert len(everything[4]) == 101
    # Positions 391 on, of which 388 begins a unit.
    assert len(windowed[4]) == 4


@pytest.mark.parametrize(("most_copies", "parts"), [(1, 3), (10, 2), (12, 1)])
def test_a_part_copies_no_more_than_it_may_unless_it_is_one_request(
    most_copies: int, parts: int
) -> None:
    batch = Batch([(8, star(2))] * 3, 16, [0] * 3)
    ends = batch.plan(most_copies=most_copies)[0]
    assert len(ends) == parts
