# SPDX-License-Identifier: Apache-2.0
"""The batch's trees are the table's first nodes, and its rows have the positions n + depth."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import bushy, token_trees
from vllm_redrafter.triton_kernels.build_tree import TreeBuffers
from vllm_redrafter.triton_kernels.stage_trees import (
    StagedTrees,
    stage_trees,
)

SENTINEL = -77


def naive_stage_trees(
    table: TreeBuffers,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
) -> tuple[list[dict[str, list[int]]], list[int]]:
    """`stage_trees` by loops: per request its fields, lists up to its last node; and positions."""
    staged, new_positions = [], positions.tolist()
    for request, slot in enumerate(idx_mapping.tolist()):
        start, end = query_start_loc[request : request + 2].tolist()
        logits = int(cu_num_logits[request + 1] - cu_num_logits[request])
        nodes = min(int(table.num_nodes[slot]), logits)
        root = end - logits
        staged.append(
            {
                "tokens": table.tokens[slot, :nodes].tolist(),
                "parents": table.parents[slot, :nodes].tolist(),
                "depths": table.depths[slot, :nodes].tolist(),
                "context_len": [int(seq_lens[request]) - (end - start)],
                "row_start": [root],
            }
        )
        for node in range(logits):
            depth = int(table.depths[slot, node]) if node < nodes else 0
            new_positions[root + node] = int(positions[root]) + depth
    return staged, new_positions


@dataclass(frozen=True)
class Request:
    """One request of a batch: its slot, context, query rows, and how many of them have logits."""

    slot: int
    context: int
    query: int
    logits: int


def table_of(trees: Sequence[Sequence[int]], max_nodes: int, device: torch.device) -> TreeBuffers:
    tree = token_trees(trees, max_nodes + 1)
    table = TreeBuffers(len(trees), max_nodes, device)
    for name in ("tokens", "parents", "depths", "num_nodes", "ancestors"):
        getattr(table, name).copy_(getattr(tree, name))
    return table


def check(
    device: torch.device,
    trees: Sequence[Sequence[int]],
    max_nodes: int,
    batch: Sequence[Request],
    more_padding: int = 0,
    integers: torch.dtype = torch.int64,
) -> None:
    """`stage_trees` does what the loops do, and leaves other rows and requests alone."""
    table = table_of(trees, max_nodes, device)
    starts = torch.tensor([0, *(r.query for r in batch)]).cumsum(0)
    logits = torch.tensor([0, *(r.logits for r in batch)]).cumsum(0)
    positions = torch.cat(
        [torch.arange(r.context, r.context + r.query) for r in batch] + [torch.tensor([SENTINEL])]
    )
    arguments = (
        torch.tensor([r.slot for r in batch], dtype=integers).to(device),
        starts.to(torch.int32).to(device),
        logits.to(torch.int32).to(device),
        torch.tensor([r.context + r.query for r in batch], dtype=torch.int32).to(device),
    )
    staged, expected_positions = naive_stage_trees(table, *arguments, positions)
    out = StagedTrees(len(batch) + more_padding + 1, max_nodes, device)
    for name in ("num_nodes", "context_lens", "row_start"):
        getattr(out, name).fill_(SENTINEL)
    moved = positions.to(integers).to(device)
    stage_trees(table, *arguments, moved, out, len(batch) + more_padding)
    assert moved.tolist() == expected_positions
    for i, expected in enumerate(staged):
        nodes = int(out.num_nodes[i])
        assert [int(out.context_lens[i])] == expected["context_len"]
        assert [int(out.row_start[i])] == expected["row_start"]
        for name in ("tokens", "parents", "depths"):
            assert getattr(out, name)[i, :nodes].tolist() == expected[name]
        assert torch.equal(out.ancestors[i], table.ancestors[batch[i].slot])
    padded = slice(len(batch), len(batch) + more_padding)
    assert not out.num_nodes[padded].any() and not out.context_lens[padded].any()
    assert int(out.num_nodes[-1]) == int(out.context_lens[-1]) == SENTINEL


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_batch(device: torch.device, data: st.DataObject) -> None:
    max_nodes = data.draw(st.sampled_from([1, 7, 31, 40]))
    slots = data.draw(st.integers(1, 4))
    nodes = [data.draw(st.integers(1, max_nodes + 1)) for _ in range(slots)]
    order = data.draw(st.permutations(range(slots)))
    batch = []
    for slot in order[: data.draw(st.integers(1, slots))]:
        logits = data.draw(st.integers(1, max_nodes + 1))
        more = data.draw(st.sampled_from([0, 0, 3])) if logits == 1 else 0
        batch.append(Request(slot, data.draw(st.integers(0, 90)), logits + more, logits))
    trees = [bushy(n, seed=n) for n in nodes]
    check(device, trees, max_nodes, batch, more_padding=data.draw(st.integers(0, 2)))


def test_arguments_that_do_not_fit_are_named(device: torch.device) -> None:
    table = table_of([bushy(4)], 3, device)
    out = StagedTrees(1, 3, device)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = integers(0), integers(0, 4), integers(0, 4), integers(9), integers(5, 6, 7, 8)
    names = "idx_mapping", "query_start_loc", "cu_num_logits", "seq_lens", "positions"
    good = {**dict(zip(names, batch, strict=True)), "out": out, "num_padded": 1}
    stage_trees(table, **good)
    for change, message in (
        ({"seq_lens": integers(9).long()}, "seq_lens: expected torch.int32"),
        ({"cu_num_logits": integers(4)}, "cu_num_logits: 1 is too few, needed are 2"),
        ({"num_padded": 2}, "out: 1 is too few, needed are 2"),
        ({"num_padded": 0}, "num_padded: 0 is too few"),
        ({"positions": torch.zeros(4, device=device)}, "positions: expected one dimension"),
        ({"out": StagedTrees(1, 2, device)}, "trees of 3 nodes cannot hold the table's of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            stage_trees(table, **{**good, **change})
