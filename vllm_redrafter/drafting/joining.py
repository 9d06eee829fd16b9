# SPDX-License-Identifier: Apache-2.0
"""The nodes of a search and of prompt-lookup (n-gram) matches in one grid, on the host."""

from typing import NamedTuple

import numpy as np

from vllm_redrafter.utils.compiled import Array, compiled


class DraftNodes(NamedTuple):
    """What may be in the trees of R requests, [R, L, W] each: int64, but float32 `log_probs`.

    Attributes:
        log_probs: of the search, cumulative; -inf where it has no node.
        match_classes: of nodes on paths (see `ContextMatches`); 0 for others.
    """

    tokens: Array
    back_pointers: Array
    log_probs: Array
    match_classes: Array


@compiled
def joined_nodes(
    tokens: Array, back_pointers: Array, log_probs: Array, paths: Array, path_classes: Array
) -> tuple[Array, Array, Array, Array]:
    """A search's nodes [R, L, W], L and W may be 0, and those of paths [R, M, D], no node twice.

    A path's nodes stand where the search has them, if it does; else below, in the path's column.
    `path_classes` [R, M, D] are of the paths' tokens. Returns the fields of `DraftNodes`,
    [R, max(L, D), W + M].
    """
    requests, length, width = tokens.shape
    num_paths, depth = paths.shape[1:]
    shape = (requests, max(length, depth), width + num_paths)
    all_tokens = np.zeros(shape, dtype=np.int64)
    pointers = np.zeros(shape, dtype=np.int64)
    all_log_probs = np.full(shape, -np.inf, dtype=np.float32)
    match_classes = np.zeros(shape, dtype=np.int64)
    all_tokens[:, :length, :width] = tokens
    pointers[:, :length, :width] = back_pointers
    all_log_probs[:, :length, :width] = log_probs
    for r in range(requests):
        for path in range(num_paths):
            beam, shared = 0, True
            for level in range(depth):
                token = paths[r, path, level]
                if token < 0:
                    break
                at = width + path
                if shared and level < length:
                    for other in range(width):
                        same = tokens[r, level, other] == token
                        below = level == 0 or back_pointers[r, level, other] == beam
                        if same and below and log_probs[r, level, other] > -np.inf:
                            at = other
                            break
                shared = at < width
                if not shared:
                    all_tokens[r, level, at] = token
                    pointers[r, level, at] = beam if level else 0
                match_classes[r, level, at] = path_classes[r, path, level]
                beam = at
    return all_tokens, pointers, all_log_probs, match_classes
