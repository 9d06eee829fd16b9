# SPDX-License-Identifier: Apache-2.0
"""The batch of a step with drafts: trees and rows of all requests, in one compiled pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.utils.compiled import Array, compiled


@dataclass(frozen=True)
class VerificationStep:
    """One engine step's batch with drafts: R requests, those without being trees of one node.

    Attributes:
        tree: the trees under verification, T node slots.
        root_rows: [R] int64, the flat row of each root among the step's tokens; a request's
            other nodes follow it.
        node_rows: [R, T] int64, the flat row of each node; unused slots repeat their root's.
        first_logits: [R] int64, the row of each root among the logits, which leave out all but the
            last row of a prompt; a request's other nodes follow it.
        drafted: [R] int64, the nodes of each tree that were drafted: no root, no padding.
        branching: [N] int64, the requests whose tree is no chain (chains are linear: vLLM's
            kernel serves).
        only_nodes: the trees' nodes are all that the step reads: no prompt.
    """

    tree: TokenTree
    root_rows: Tensor
    node_rows: Tensor
    first_logits: Tensor
    drafted: Array
    branching: Tensor
    only_nodes: bool

    def place(self, positions: Tensor) -> None:
        """Set the nodes' positions [M-RoPE dimensions, rows] int64 to their roots' + depth."""
        roots = positions[:, self.root_rows].unsqueeze(-1)
        positions[:, self.node_rows] = roots + self.tree.depths


def verification_step(
    links: Sequence[Array],
    num_drafted: Sequence[int],
    ends: Array,
    input_ids: Array,
    positions: Array,
    num_rows: int,
) -> VerificationStep:
    """For each request the first nodes, as many as are scheduled, of the tree drafted last.

    Args:
        links: of each request [2, K+1] int32, parents and depths of the tree drafted last; not
            read where nothing is scheduled.
        num_drafted: how many nodes are scheduled, roots not counted.
        ends: [R] int32, behind each request's last row.
        input_ids: [rows] int32, with the drafted tokens in their places.
        positions: [rows] int64, linear; becomes n + depth for the nodes.
        num_rows: of the step.
    """
    *tree, root_rows, node_rows, first_logits, drafted, branching = _arranged(
        np.stack(links), np.array(num_drafted, dtype=np.int64), ends, input_ids, positions
    )
    return VerificationStep(
        TokenTree(*map(torch.from_numpy, tree)),
        torch.from_numpy(root_rows),
        torch.from_numpy(node_rows),
        torch.from_numpy(first_logits),
        drafted,
        torch.from_numpy(branching),
        only_nodes=sum(num_drafted) + len(num_drafted) == num_rows,
    )


@compiled
def _arranged(
    links: Array, num_drafted: Array, ends: Array, input_ids: Array, positions: Array
) -> tuple[Array, Array, Array, Array, Array, Array, Array, Array, Array]:
    """`TokenTree`'s four tensors, then as in `VerificationStep`."""
    requests, slots = len(num_drafted), num_drafted.max() + 1
    tokens = np.full((requests, slots), -1, dtype=np.int32)
    parents = np.zeros((requests, slots), dtype=np.int32)
    depths = np.zeros((requests, slots), dtype=np.int32)
    num_nodes = np.empty(requests, dtype=np.int32)
    root_rows = np.empty(requests, dtype=np.int64)
    node_rows = np.empty((requests, slots), dtype=np.int64)
    first_logits = np.empty(requests, dtype=np.int64)
    drafted = np.zeros(requests, dtype=np.int64)
    branching = np.empty(requests, dtype=np.int64)
    logits = branches = 0
    for r in range(requests):
        nodes = num_drafted[r] + 1
        root = ends[r] - nodes
        num_nodes[r], root_rows[r], first_logits[r] = nodes, root, logits
        logits += nodes
        node_rows[r] = root
        is_chain = True
        for node in range(nodes):
            if node:
                parents[r, node], depths[r, node] = links[r, 0, node], links[r, 1, node]
                is_chain &= parents[r, node] == node - 1
            node_rows[r, node] = root + node
            tokens[r, node] = input_ids[root + node]
            drafted[r] += node > 0 and tokens[r, node] >= 0
            positions[root + node] = positions[root] + depths[r, node]
        if not is_chain:
            branching[branches] = r
            branches += 1
    branching = branching[:branches].copy()
    tree = (tokens, parents, depths, num_nodes)
    return (*tree, root_rows, node_rows, first_logits, drafted, branching)
