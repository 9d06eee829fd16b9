# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk in MLX: `tree/acceptance.py` says it in torch, and why it is lossless."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class AcceptedPath(NamedTuple):
    """What a verification step accepted.

    Attributes:
        path: [D+1] int32, the nodes walked, root first; beyond the end, the last one again.
        length: [] int32, how many nodes were walked; so many tokens are output.
        last_node: [] int32, where the walk stopped.
    """

    path: mx.array
    length: mx.array
    last_node: mx.array


def accept_path(
    tokens: mx.array,
    parents: mx.array,
    depths: mx.array,
    sees: mx.array,
    sampled: mx.array,
    max_depth: int,
) -> AcceptedPath:
    """Walk a tree along the tokens that the target sampled; nothing is evaluated here.

    Args:
        tokens: [N] integers, of the nodes; the root, node 0, comes first. Siblings carry different
            tokens.
        parents: [N] integers; the root is its own.
        depths: [N] integers; the root's is 0.
        sees: [N, N] bool, entry (i, j): j is i or an ancestor of i.
        sampled: [N] integers, the target's token at each node.
        max_depth: D, the largest depth or more.
    """
    is_root = depths == 0
    matches = (tokens == sampled[parents]) | is_root
    # A node is walked through if it and all its ancestors match what their parents sampled: of
    # each depth there is one at most.
    walked = mx.all(matches | ~sees, axis=1)
    length = walked.sum()
    last_node = mx.argmax(mx.where(walked, depths, -1)).astype(mx.int32)
    steps = mx.arange(max_depth + 1, dtype=mx.int32)
    at_depth = mx.argmax(walked & (depths == steps[:, None]), axis=1).astype(mx.int32)
    return AcceptedPath(mx.where(steps < length, at_depth, last_node), length, last_node)
