# SPDX-License-Identifier: Apache-2.0
"""The batch's trees are the table's first nodes, and its rows have the positions n + depth."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter_testing.algorithm.tree_batches import bushy, token_trees
from vllm_redrafter.triton_kernels.build_tree import TreeBuffers
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees, add_depths, stage_trees

SENTINEL = -77


class Request(NamedTuple):
    """One request of a batch: its slot, context, query rows, and how many of them have logits."""

    slot: int
    context: int
    query: int
    logits: int


def with_depths(
    positions: list[int], roots: Sequence[int], logits: Sequence[int], depths: Sequence[list[int]]
) -> list[int]:
    """The positions after staging: each row with logits has its root's and its node's depth."""
    moved = [*positions]
    for root, count, own in zip(roots, logits, depths, strict=True):
        for node in range(count):
            moved[root + node] = positions[root] + (own[node] if node < len(own) else 0)
    return moved


def check(
    device: torch.device,
    trees: Sequence[Sequence[int]],
    max_nodes: int,
    batch: Sequence[Request],
    padding: int,
) -> None:
    """Requests have their first nodes, and other rows and requests are left alone."""
    table, out = TreeBuffers(len(trees), max_nodes, device), StagedTrees(9, max_nodes, device)
    for name in ("tokens", "parents", "depths", "num_nodes", "ancestors"):
        getattr(table, name).copy_(getattr(token_trees(trees, max_nodes + 1), name))
    for name in ("num_nodes", "context_lens", "row_start"):
        getattr(out, name).fill_(SENTINEL)
    ends = torch.tensor([0, *(r.query for r in batch)]).cumsum(0)
    logits = torch.tensor([0, *(r.logits for r in batch)]).cumsum(0)
    positions = [r.context + row for r in batch for row in range(r.query)] + [SENTINEL]
    moved = torch.tensor(positions, dtype=torch.int64, device=device)
    cu_num_logits = logits.int().to(device)
    stage_trees(
        table,
        torch.tensor([r.slot for r in batch], dtype=torch.int64, device=device),
        ends.int().to(device),
        cu_num_logits,
        torch.tensor([r.context + r.query for r in batch], dtype=torch.int32, device=device),
        moved,
        out,
        len(batch) + padding,
    )
    roots = [int(end) - r.logits for end, r in zip(ends[1:], batch, strict=True)]
    counts = [min(len(trees[r.slot]), r.logits) for r in batch]
    depths = [table.depths[r.slot, :n].tolist() for n, r in zip(counts, batch, strict=True)]
    expected = with_depths(positions, roots, [r.logits for r in batch], depths)
    assert moved.tolist() == expected
    # M-RoPE: of each dimension another root.
    dimensions = [[7 * d + position for position in positions] for d in range(3)]
    of_rope = torch.tensor(dimensions, device=device)
    add_depths(out, cu_num_logits, of_rope)
    assert of_rope.tolist() == [[7 * d + position for position in expected] for d in range(3)]
    assert out.num_nodes[: len(batch)].tolist() == counts
    assert out.row_start[: len(batch)].tolist() == roots
    assert out.context_lens[: len(batch)].tolist() == [r.context for r in batch]
    for i, (request, nodes) in enumerate(zip(batch, counts, strict=True)):
        for name in ("tokens", "parents", "depths"):
            staged, of_table = getattr(out, name)[i], getattr(table, name)[request.slot]
            assert staged[:nodes].tolist() == of_table[:nodes].tolist()
        assert torch.equal(out.ancestors[i], table.ancestors[request.slot])
    end = len(batch) + padding
    for field in (out.num_nodes, out.context_lens):
        assert not field[len(batch) : end].any() and (field[end:] == SENTINEL).all()


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_batch_is_staged(device: torch.device, data: st.DataObject) -> None:
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
    check(device, trees, max_nodes, batch, data.draw(st.integers(0, 2)))
