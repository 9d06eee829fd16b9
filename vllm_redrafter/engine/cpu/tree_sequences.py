# SPDX-License-Identifier: Apache-2.0
"""Attention of token trees in vLLM's own kernel, which knows no trees: a sequence for each node.

A tree's K+1 rows lie in the linear slots n .. n+K of their request, in node order, where n is the
context length. Node i sees every slot of the context, and among the tree's slots those of its
ancestors and its own; its position is n + depth(i), which is what RoPE, sliding windows and ALiBi
must see instead of the slot.

So node i is the last token of a sequence of n + depth(i) + 1: the context, its ancestors, itself.
Nodes that follow the root in a line share one sequence, with its last rows for a query. K and V are
copied, layer by layer: the context once for all of a request's nodes but for its last few tokens,
and these once for every leaf, followed by the rows of the leaf's ancestors, at whose positions
sequences of the inner nodes end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.engine.cpu import path_copies
from vllm_redrafter.engine.cpu.cache_layout import UNIT
from vllm_redrafter.engine.cpu.path_copies import PathCopies
from vllm_redrafter.engine.cpu.tree_plan import plan_sequences
from vllm_redrafter.tree.token_tree import TokenTree

PART_BYTES = 1 << 24
"""K and V that are copied at once for several requests; a single one may have more."""


@dataclass(frozen=True)
class TreePart:
    """Requests whose rows follow one another, as S sequences over copied K and V.

    Attributes:
        query_start_loc: [S + 1] int32, the rows of each sequence among the step's.
        seq_lens: [S] int32, queries counted.
        block_table: [S, columns] int32, in blocks of `UNIT` tokens of the copies.
        copies: what is to be copied before the kernel reads it.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    copies: PathCopies

    @property
    def sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query_start_loc, self.seq_lens, self.block_table


def tree_parts(
    tree: TokenTree,
    root_rows: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    window: int,
    bytes_of_token: int,
) -> Iterator[TreePart]:
    """Lay a step's trees out, once for all layers of a cache group; see `plan_sequences`.

    Args:
        bytes_of_token: of K and V in a layer.
    """
    ends, bounds, lengths, table, *copied = plan_sequences(
        np.ascontiguousarray(tree.num_nodes.numpy(), dtype=np.int32),
        np.ascontiguousarray(tree.parents.numpy(), dtype=np.int32),
        np.ascontiguousarray(tree.depths.numpy(), dtype=np.int32),
        np.ascontiguousarray(root_rows.numpy(), dtype=np.int64),
        np.ascontiguousarray(context_lens.numpy(), dtype=np.int64),
        np.ascontiguousarray(block_table.numpy(), dtype=np.int32),
        block_size,
        UNIT,
        window,
        PART_BYTES // (UNIT * bytes_of_token),
    )
    begin = [0, 0, 0]
    for part, end in enumerate(ends.tolist()):
        sequences, copies, moves = map(slice, begin, end)
        yield TreePart(
            torch.from_numpy(bounds[sequences.start + part : sequences.stop + part + 1]),
            torch.from_numpy(lengths[sequences]),
            torch.from_numpy(table[sequences]),
            PathCopies(copied[0][copies], copied[1][moves], copied[2][moves]),
        )
        begin = end


def warm_up(dtype: torch.dtype) -> None:
    """Let numba compile now, and not in the first step, for a cache of this dtype."""
    root = torch.zeros(1, 1, dtype=torch.int32)
    tree = TokenTree(root, root, root, num_nodes=torch.ones(1, dtype=torch.int32))
    rows = torch.zeros(1, dtype=torch.int64)
    list(tree_parts(tree, rows, rows, root, UNIT, -1, bytes_of_token=1))
    path_copies.warm_up(dtype)
