# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk: which path of a tree did the target itself sample?

The target draws a token at every node, given that node's path. The walk goes on from the root while
a child carries the drawn token; the token drawn where it stops is the extra one. So the output is
distributed as the target's, whatever the tree. The tree is a point-mass proposal, of which this is
the rejection rule: no rule accepts more for given children.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_redrafter.tree.token_tree import TokenTree


@dataclass(frozen=True)
class AcceptedPath:
    """What a verification step accepted, for R requests with K+1 node slots.

    Attributes:
        output_tokens: [R, K+1] int32, the accepted tokens and the extra one; -1 after them.
        num_sampled: [R] int32, how many: between 1 and K+1.
        path: [R, K+1] int64, the nodes walked, root first; -1 after them. `path[:, d]` is at
            depth d, so its KV row belongs into linear slot d.
        last_node: [R] int64, where the walk stopped; its hidden state feeds the drafter.
    """

    output_tokens: Tensor
    num_sampled: Tensor
    path: Tensor
    last_node: Tensor


def accept_path(tree: TokenTree, sampled: Tensor) -> AcceptedPath:
    """Walk every request's tree along `sampled`, [R, K+1]: the target's token at each node."""
    parents = tree.parents.long()
    matches = (tree.tokens == sampled.gather(1, parents)) & tree.is_node
    matches[:, 0] = True
    # A node is walked through if it and all its ancestors match what their parents sampled.
    # Siblings carry different tokens, so the walked nodes are one path, one node per depth.
    walked = (matches.unsqueeze(1) | ~tree.ancestor_mask).all(dim=2) & tree.is_node
    num_sampled = walked.sum(dim=1)

    slots = tree.tokens.shape[1]
    # Nodes that are not walked are scattered into a spare last column.
    depth = tree.depths.long().masked_fill(~walked, slots)
    spare = (tree.tokens.shape[0], slots + 1)
    nodes = torch.arange(slots, device=depth.device).expand_as(depth)
    path = nodes.new_full(spare, -1).scatter_(1, depth, nodes)[:, :slots]
    drawn = sampled.to(torch.int32)
    output = drawn.new_full(spare, -1).scatter_(1, depth, drawn)[:, :slots]
    last_node = path.gather(1, num_sampled.unsqueeze(1) - 1).squeeze(1)
    return AcceptedPath(output, num_sampled.to(torch.int32), path, last_node)
