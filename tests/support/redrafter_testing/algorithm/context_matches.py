# SPDX-License-Identifier: Apache-2.0
"""Continuations found in a text, one place at a time, and searches to join them with."""

from collections.abc import Sequence

import torch

from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import (
    AGREED,
    ALONE,
    LENGTH_CLASSES,
    LONGEST_MATCH,
    PARTED,
    ContextMatches,
    classes_of,
)


def slow_matches(
    text: Sequence[int], num_paths: int, path_length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The paths and their tokens' classes, as `ContextMatches` has them of one request."""
    text = list(text)
    places = [
        (length, end)
        for end in range(len(text) - 1)
        for length in range(1, min(LONGEST_MATCH, end + 1) + 1)
        if text[end + 1 - length : end + 1] == text[len(text) - length :]
    ]
    longest = {end: length for length, end in sorted(places)}
    ranked = sorted(((length, end) for end, length in longest.items()), reverse=True)
    followed = [(length, (text[end + 1 :] * path_length)[:path_length]) for length, end in ranked]
    paths: list[list[int]] = []
    classes: list[list[int]] = []
    for length, path in followed:
        if len(paths) < num_paths and path[0] not in [other[0] for other in paths]:
            says = [PARTED] + [ALONE] * (path_length - 1)
            if not paths:
                second = next((p for n, p in followed[1:2] if n == length), None)
                same = [] if second is None else [a == b for a, b in zip(path, second, strict=True)]
                parts = same.index(False) if False in same else len(same)
                says = [AGREED] * parts + [PARTED if same else ALONE] + [ALONE] * path_length
            paths.append(path)
            classes.append([length + LENGTH_CLASSES * each for each in says[:path_length]])
    missing = num_paths - len(paths)
    return paths + [[-1] * path_length] * missing, classes + [[0] * path_length] * missing


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
    agreeing = draw(depth + 2, requests, num_paths) - 1
    classes = classes_of(lengths, agreeing, depth).masked_fill(paths < 0, 0)
    return ExploredNodes(tokens, pointers, log_probs), ContextMatches(paths, classes)
