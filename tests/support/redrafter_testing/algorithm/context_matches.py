# SPDX-License-Identifier: Apache-2.0
"""Continuations found in a text, one place at a time, and searches to join them with."""

from collections.abc import Sequence

import torch

from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import LONGEST_MATCH, ContextMatches


def slow_matches(
    text: Sequence[int], num_paths: int, path_length: int
) -> tuple[list[list[int]], list[int]]:
    """The paths and the lengths of their matches, as `ContextMatches` has them of one request."""
    text = list(text)
    places = [
        (length, end)
        for end in range(len(text) - 1)
        for length in range(1, min(LONGEST_MATCH, end + 1) + 1)
        if text[end + 1 - length : end + 1] == text[len(text) - length :]
    ]
    paths: list[list[int]] = []
    lengths: list[int] = []
    for length, end in sorted(places, reverse=True):
        path = text[end + 1 :]
        path = (path * path_length)[:path_length]
        if len(paths) < num_paths and path[0] not in [other[0] for other in paths]:
            paths.append(path)
            lengths.append(length)
    missing = num_paths - len(paths)
    return paths + [[-1] * path_length] * missing, lengths + [0] * missing


def search_and_paths(
    seed: int, length: int = 3, width: int = 3, num_paths: int = 2, depth: int = 5
) -> tuple[ExploredNodes, ContextMatches]:
    """Of 4 requests: a search over few tokens, and paths that share some of its nodes; without some
    of each."""
    random = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=random)

    requests = 4
    tokens, pointers = draw(4, requests, length, width), draw(width, requests, length, width)
    # Children of one node carry different tokens, and a node's parent is one.
    log_probs = torch.zeros(requests, length, width)
    for r in range(requests):
        for level in range(length):
            seen = set()
            for beam in range(width):
                above = int(pointers[r, level, beam]) if level else 0
                child = above, int(tokens[r, level, beam])
                orphan = level > 0 and log_probs[r, level - 1, above] == -torch.inf
                if child in seen or orphan or draw(5, 1) == 0:
                    log_probs[r, level, beam] = -torch.inf
                else:
                    seen.add(child)
                    log_probs[r, level, beam] = (
                        float(log_probs[r, level - 1, above]) - 1.0 if level else -1.0
                    )
    paths = draw(4, requests, num_paths, depth)
    for path in range(1, num_paths):
        paths[:, path, 0] = (paths[:, 0, 0] + path) % 4
    paths[0, 0, 2:] = -1
    lengths = draw(5, requests, num_paths) + 1
    lengths[1, -1], paths[1, -1] = 0, -1
    return ExploredNodes(tokens, pointers, log_probs), ContextMatches(paths, lengths)
