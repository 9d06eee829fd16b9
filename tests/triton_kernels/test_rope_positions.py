# SPDX-License-Identifier: Apache-2.0
"""A tree's rows have the positions of its root + depth, in every dimension of M-RoPE."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import bushy, token_trees
from vllm_redrafter.triton_kernels.rope_positions import add_depths
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees

PROMPT = 3
"""Rows of a prompt before each tree, whose positions are to stay."""


def naive_add_depths(
    staged: StagedTrees, cu_num_logits: Tensor, positions: Tensor
) -> list[list[int]]:
    """What `add_depths` makes of the positions, by loops."""
    found: list[list[int]] = positions.tolist()
    for request in range(cu_num_logits.shape[0] - 1):
        logits = int(cu_num_logits[request + 1] - cu_num_logits[request])
        nodes, root = int(staged.num_nodes[request]), int(staged.row_start[request])
        for row in found:
            for node in range(logits):
                depth = int(staged.depths[request, node]) if node < nodes else 0
                row[root + node] = row[root] + depth
    return found


def staged_trees(
    device: torch.device, nodes: list[int], logits: list[int], max_nodes: int
) -> tuple[StagedTrees, torch.Tensor]:
    """Trees of so many nodes and rows of logits; and `cu_num_logits`."""
    staged = StagedTrees(len(nodes) + 1, max_nodes, device)
    tree = token_trees([bushy(count, seed=count) for count in nodes], max_nodes + 1)
    staged.depths[: len(nodes)].copy_(tree.depths)
    staged.num_nodes[: len(nodes)].copy_(tree.num_nodes)
    ends = torch.tensor(logits).cumsum(0) + PROMPT * torch.arange(1, len(nodes) + 1)
    staged.row_start[: len(nodes)].copy_(ends - torch.tensor(logits))
    sums = torch.tensor([0, *logits]).cumsum(0)
    return staged, sums.to(device=device, dtype=torch.int32)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_batch(device: torch.device, data: st.DataObject) -> None:
    """Whole trees, cut ones, and rows behind a tree's end; of each dimension another root."""
    max_nodes = data.draw(st.sampled_from([1, 7, 40]))
    logits = data.draw(st.lists(st.integers(1, max_nodes + 1), min_size=1, max_size=4))
    nodes = [data.draw(st.integers(1, count)) for count in logits]
    staged, sums = staged_trees(device, nodes, logits, max_nodes)
    rows = sum(logits) + PROMPT * len(logits)
    # A column more than rows, as vLLM's.
    buffer = torch.arange(3 * (rows + 1), device=device).view(3, rows + 1) * 7
    expected = naive_add_depths(staged, sums, buffer)
    add_depths(staged, sums, buffer)
    assert buffer.tolist() == expected


def test_arguments_that_do_not_fit_are_named(device: torch.device) -> None:
    staged, sums = staged_trees(device, [2], [2], 3)
    positions = torch.zeros(3, 9, dtype=torch.int64, device=device)
    add_depths(staged, sums, positions)
    for arguments, message in (
        ((staged, sums.long(), positions), "cu_num_logits: expected torch.int32"),
        ((staged, sums, positions[0]), "positions: expected two dimensions of torch.int64"),
        ((staged, sums, positions.int()), "positions: expected two dimensions of torch.int64"),
        ((staged, sums, positions.T), "positions"),
        ((staged, sums.repeat(3), positions), "staged: 2 is too few, needed are 5"),
    ):
        with pytest.raises(ValueError, match=message):
            add_depths(*arguments)
