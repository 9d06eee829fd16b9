"""The compiled planning against numpy, which says the same of whole arrays."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from redrafter_testing.algorithm.tree_batches import bushy, chain, star, token_trees
from vllm_redrafter.engine.cpu import tree_attention, tree_parts, tree_plan
from vllm_redrafter.engine.cpu.tree_attention import TreeQueries
from vllm_redrafter.engine.cpu.tree_gather import LayerShape, Workspace
from vllm_redrafter.engine.cpu.tree_parts import TreePart
from vllm_redrafter.token_tree import TokenTree

Array = npt.NDArray[Any]

SHAPE = LayerShape(kv_heads=2, group=3, head_size=8, dtype=torch.float32)
BLOCK_SIZES = (16, 32, 128)
WINDOWS = (-1, 1, 2, 7, 16, 40, 1000)
STALE = -(2**30)
"""In the block table behind a request's own blocks: whoever reads it leaves the cache."""


class Reference:
    """A part of all requests."""

    def __init__(self, step: TreeQueries, window: int) -> None:
        self.block_size, self.window = step.block_size, window
        self.num_nodes = step.tree.num_nodes.numpy()
        self.slots = slice(0, self.num_nodes.max())
        self.rows = step.rows.numpy()[:, self.slots]
        self.depths = step.tree.depths.numpy()[:, self.slots]
        self.ancestors = step.tree.ancestor_mask.numpy()[:, self.slots, self.slots]
        self.block_table = step.block_table.numpy()
        self.context_lens = step.context_lens.numpy()
        self.end = -(-(self.context_lens + self.num_nodes) // self.block_size)
        self.first = np.zeros_like(self.end)
        if window > 0:
            self.first = (self.context_lens - window + 1).clip(0) // self.block_size
        self.first_slots = self.first * self.block_size
        self.contexts = self.context_lens - self.first_slots

    def block_ids(self) -> Array:
        blocks = self.first[:, None] + np.arange((self.end - self.first).max())
        width = self.block_table.shape[1]
        ids = np.take_along_axis(self.block_table, blocks.clip(max=width - 1), axis=1)
        return np.where(blocks < self.end[:, None], ids, 0)

    def num_slots(self) -> int:
        return -(-int((self.contexts + self.num_nodes).max()) // 16) * 16

    def hidden_from(self) -> int:
        farthest = (self.contexts + self.depths.max(axis=1)).max()
        return 0 if 0 < self.window <= farthest else int(self.contexts.min())

    def slice(self) -> slice | None:
        rows = self.rows.ravel()
        follow = np.array_equal(rows, np.arange(rows[0], rows[0] + rows.size))
        return slice(int(rows[0]), int(rows[0]) + rows.size) if follow else None

    def distances(self) -> Array:
        """[R, T, S]: each slot's key position minus each node's."""
        nodes = np.arange(self.num_slots()) - self.contexts[:, None]
        depths = np.take_along_axis(self.depths, nodes.clip(0, self.slots.stop - 1), axis=1)
        return np.where(nodes < 0, nodes, depths)[:, None] - self.depths[:, :, None]

    def bias(self) -> Array:
        """[R, T, S - hidden_from]"""
        requests, nodes = self.rows.shape
        # By node of the tree, and before them the context, after them what is in no tree.
        table = np.full((requests, nodes, nodes + 2), -np.inf, dtype=np.float32)
        table[:, :, 0] = 0
        table[:, :, 1:-1][self.ancestors] = 0
        column = (np.arange(self.num_slots()) - self.contexts[:, None]).clip(-1, nodes) + 1
        bias = np.take_along_axis(table, column[:, None].repeat(nodes, axis=1), axis=2)
        if self.window > 0:
            bias[-self.distances() >= self.window] = -np.inf
        return bias[:, :, self.hidden_from() :]


def random_trees(rng: random.Random, requests: int) -> TokenTree:
    """Of all sizes and kinds; there may be slots that none of them uses."""
    most = rng.choice([1, 2, 13, 40])
    kinds: list[Callable[[int], list[int]]] = [
        lambda nodes: bushy(nodes, rng.randrange(1000)),
        chain,
        star,
    ]
    full = rng.random() < 0.5
    trees = [rng.choice(kinds)(most if full else rng.randint(1, most)) for _ in range(requests)]
    return token_trees(trees, most + rng.choice([0, 3]))


def random_step(seed: int, block_size: int) -> TreeQueries:
    rng = random.Random(seed)
    requests = 1 + seed % 8
    tree = random_trees(rng, requests)
    nodes = tree.num_nodes.long()
    longest = rng.choice([0, 5, 100, 300])
    context = torch.tensor([rng.randint(0, longest) for _ in range(requests)])
    blocks = -(-(context + nodes) // block_size)
    table = torch.randint(1, 1 << 20, (requests, int(blocks.max()) + rng.choice([0, 2])))
    table[torch.arange(table.shape[1]) >= blocks[:, None]] = STALE
    roots = rng.randint(0, 9) + nodes.cumsum(0) - nodes
    node = torch.arange(tree.tokens.shape[1]).masked_fill(~tree.is_node, 0)
    return TreeQueries(tree, roots[:, None] + node, context, table.int(), block_size)


def one_part(step: TreeQueries, window: int) -> TreePart:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_parts, "PADDING_BYTES", tree_parts.PART_BYTES)
        (part,) = step.parts(SHAPE, window)
    return part


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_part_is_what_numpy_says(window: int, block_size: int) -> None:
    for seed in range(40):
        step = random_step(seed, block_size)
        part, expected = one_part(step, window), Reference(step, window)
        assert np.array_equal(part.rows, expected.rows)
        assert np.array_equal(part.first_slots, expected.first_slots)
        assert np.array_equal(part.block_ids, expected.block_ids())
        assert part.num_slots == expected.num_slots()
        assert part.hidden_from == expected.hidden_from()
        assert part.slice == expected.slice()
        assert part.bias.dtype == torch.float32
        assert np.array_equal(part.bias.numpy(), expected.bias()[:, None, None])
        distances = part.float_distances.numpy()
        assert np.array_equal(distances, expected.distances()[:, None, None])


def test_slices_and_windows_that_hide_are_among_those() -> None:
    parts = [one_part(random_step(seed, 16), window) for seed in range(40) for window in (-1, 7)]
    assert {part.slice is None for part in parts} == {False, True}
    assert {part.hidden_from == 0 for part in parts} == {False, True}
    assert max(len(part.rows) for part in parts) == 8


def test_nothing_is_written_beyond_the_columns() -> None:
    """Two nodes at the end of 16 columns, and an unused slot that would be the 17th."""
    memory = np.full((4, 16), 5.0, dtype=np.float32)
    parents, depths = np.array([[0, 0, 0], [0, 1, 0]], dtype=np.int32)
    tree_plan._hide(memory[:3], 14, parents, depths, tree_plan.UNLIMITED)
    hidden = -np.inf
    assert memory[:, :14].tolist() == [[0.0] * 14] * 3 + [[5.0] * 14]
    assert memory[:, 14:].tolist() == [[0.0, hidden], [0.0, 0.0], [0.0, hidden], [5.0, 5.0]]


@pytest.mark.parametrize(("kv_heads", "head_size"), [(1, 1), (2, 8), (3, 64)])
@pytest.mark.parametrize("block_ids", [[[5]], [[7, 2, 9]], [[3, 4], [8, 0], [1, 6]]])
def test_gathered_rows_are_what_numpy_says(
    block_ids: list[list[int]], kv_heads: int, head_size: int
) -> None:
    blocks = np.array(block_ids)
    halves = (blocks[:, None] * kv_heads + np.arange(kv_heads)[:, None]) * 2
    dimension = np.arange(head_size)[:, None]
    key_rows, value_halves = tree_plan.gather_rows(blocks, kv_heads, head_size)
    assert np.array_equal(key_rows, (halves[:, :, None] * head_size + dimension).ravel())
    assert np.array_equal(value_halves, (halves + 1).ravel())


@pytest.mark.parametrize("most", [0, 7, 8, 9, 100])
@pytest.mark.parametrize("most_padding", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("num_blocks", [[1], [9], [4, 4], [4, 2], [2, 4], [3, 1, 3]])
def test_requests_fit_together_within_both_limits(
    num_blocks: list[int], most: int, most_padding: int
) -> None:
    padded = max(num_blocks) * len(num_blocks)
    fit = padded <= most and padded - sum(num_blocks) <= most_padding
    assert tree_plan.fit_together(np.array(num_blocks), most, most_padding) == fit


def test_the_rehearsal_compiles_all_that_steps_call() -> None:
    functions: list[Any] = [
        tree_plan.block_ranges,
        tree_plan.fit_together,
        tree_plan.plan_part,
        tree_plan.gather_rows,
    ]
    tree_attention.rehearse()
    rehearsed = [function.signatures for function in functions]
    assert all(rehearsed)
    for seed in range(8):
        step = random_step(seed, block_size=16)
        for window in (-1, 7):
            step.products(SHAPE, window, Workspace())
    # Of another type and layout.
    step.block_table = step.block_table.long().T.contiguous().T
    step.parts(SHAPE, -1)
    assert [function.signatures for function in functions] == rehearsed
