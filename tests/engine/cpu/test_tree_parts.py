"""How a step's trees are split, and what a part gathers and masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_redrafter.engine.cpu import tree_parts
from vllm_redrafter.engine.cpu.tree_attention import TreeQueries
from vllm_redrafter.engine.cpu.tree_gather import LayerShape, Workspace
from vllm_redrafter.engine.cpu.tree_parts import Products, split_requests
from vllm_redrafter.token_tree import TokenTree

BLOCK_SIZE = 16
SHAPE = LayerShape(kv_heads=2, group=3, head_size=8, dtype=torch.float32)


def queries(context_lens: list[int], num_nodes: list[int]) -> TreeQueries:
    """Chains; request r's blocks are 100 r, 100 r + 1, ... and stale numbers follow."""
    nodes, slots = torch.tensor(num_nodes).int(), max(num_nodes)
    depths = torch.arange(slots, dtype=torch.int32).expand(len(nodes), -1)
    depths = depths.masked_fill(depths >= nodes.unsqueeze(1), 0)
    parents = (depths - 1).clamp(min=0)
    rows = torch.arange(len(nodes) * slots).view(-1, slots)
    table = 100 * torch.arange(len(nodes)).unsqueeze(1) + torch.arange(20)
    tree = TokenTree(torch.zeros_like(parents), parents, depths, nodes)
    return TreeQueries(tree, rows, torch.tensor(context_lens), table.int(), BLOCK_SIZE)


@given(
    num_blocks=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    block_bytes=st.sampled_from([1, 1 << 12, 1 << 17, 1 << 20]),
)
def test_every_request_is_in_one_part_within_the_limits(
    num_blocks: list[int], block_bytes: int
) -> None:
    blocks = np.array(num_blocks)
    parts = split_requests(blocks, block_bytes)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(blocks)))
    for part in parts:
        assert (np.diff(part) > 0).all()
        padded = len(part) * blocks[part].max() * block_bytes
        if len(part) > 1:
            assert padded <= tree_parts.PART_BYTES
            assert padded - blocks[part].sum() * block_bytes <= tree_parts.PADDING_BYTES


def test_requests_of_about_one_length_are_one_part() -> None:
    # Blocks of SmolLM2-135M, 100 to 300 tokens.
    (part,) = split_requests(np.array([2, 3, 2, 2]), tree_parts.PADDING_BYTES // 3)
    assert part.tolist() == [0, 1, 2, 3]


def test_one_long_context_pads_no_short_one() -> None:
    parts = split_requests(np.array([1, 60, 2]), 1 << 17)
    assert [part.tolist() for part in parts] == [[1], [0, 2]]


def test_blocks_beyond_a_request_s_own_are_block_0() -> None:
    (part,) = queries([20, 3], [2, 2]).parts(SHAPE, sliding_window=-1)
    assert part.block_ids.tolist() == [[0, 1], [100, 0]]
    assert part.hidden_from == 3


def test_a_part_has_the_node_slots_of_its_largest_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_parts, "PADDING_BYTES", 0)
    parts = queries([10, 200, 1], [2, 3, 9]).parts(SHAPE, sliding_window=-1)
    assert [part.rows.tolist() for part in parts] == [
        [[9, 10, 11]],
        [[0, 1, 2, 3, 4, 5, 6, 7, 8], [18, 19, 20, 21, 22, 23, 24, 25, 26]],
    ]


@pytest.mark.parametrize(
    ("window", "first_slot", "hidden_from"),
    [
        (-1, 0, 100),
        (104, 0, 100),  # the deepest node, at 103, sees position 0 still
        (103, 0, 0),
        (21, 80, 0),  # the root, at 100, sees 80
        (22, 64, 0),
    ],
)
def test_a_window_gathers_no_block_that_it_hides(
    window: int, first_slot: int, hidden_from: int
) -> None:
    (part,) = queries([100], [4]).parts(SHAPE, window)
    assert part.first_slots.tolist() == [first_slot]
    assert part.block_ids[0, 0] == first_slot // BLOCK_SIZE
    assert part.block_ids[0, -1] == 103 // BLOCK_SIZE
    assert part.hidden_from == hidden_from
    assert part.bias.shape[-1] == part.num_slots - hidden_from


@pytest.mark.parametrize(
    ("rows", "num_nodes", "expected"),
    [
        ([[4, 5, 6], [7, 8, 9]], [3, 3], slice(4, 10)),
        ([[4, 5, 6], [8, 9, 10]], [3, 3], None),  # row 7 is another request's
        ([[4, 5, 4], [6, 7, 8]], [2, 3], None),
        ([[4, 5, 6], [7, 8, 7]], [3, 2], None),
        ([[4], [6], [5], [7]], [1, 1, 1, 1], None),
        ([[4]], [1], slice(4, 5)),
    ],
)
def test_only_rows_that_follow_one_another_are_a_slice(
    rows: list[list[int]], num_nodes: list[int], expected: slice | None
) -> None:
    made = queries([9] * len(rows), num_nodes)
    made.rows = torch.tensor(rows)
    (part,) = made.parts(SHAPE, sliding_window=-1)
    assert part.slice == expected


def test_matrices_use_one_memory_again() -> None:
    workspace = Workspace()
    (large,) = queries([100], [4]).parts(SHAPE, -1)
    (small,) = queries([50], [3]).parts(SHAPE, -1)
    first = Products(large, SHAPE, workspace).matrices
    for part in (small, large):
        again = Products(part, SHAPE, workspace).matrices
        for name in ("query", "scores", "weights", "attended"):
            assert getattr(again, name).data_ptr() == getattr(first, name).data_ptr(), name
    (larger,) = queries([200], [4]).parts(SHAPE, -1)
    assert Products(larger, SHAPE, workspace).matrices.scores.data_ptr() != first.scores.data_ptr()


@pytest.mark.parametrize("threads", [1, 2, 64])
def test_a_part_of_several_requests_stays_in_the_caches_of_the_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    parts = split_requests(np.full(64, 10), tree_parts.THREAD_BYTES // 40)
    assert {len(part) for part in parts} == {min(4 * threads, 16)}
