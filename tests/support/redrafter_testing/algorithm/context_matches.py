# SPDX-License-Identifier: Apache-2.0
"""Continuations found in a text, one place at a time, and searches to join them with."""

from collections.abc import Sequence

import torch

from vllm_redrafter.drafting.joining import joined_nodes
from vllm_redrafter.drafting.own_matches import class_of
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import (
    AGREED,
    ALONE,
    LENGTH_CLASSES,
    LONGEST_MATCH,
    PARTED,
    ContextMatches,
)

Paths = tuple[list[list[int]], list[list[int]]]
"""Paths and their tokens' classes, as `ContextMatches` has them of one request."""


def slow_matches(text: Sequence[int], paths: tuple[int, int], vocab_size: int) -> Paths:
    """The best (M, D) = `paths` in a request's own text."""
    text, depth = list(text), paths[1]
    places = [
        (length, end)
        for end in range(len(text) - 1)
        for length in range(1, min(LONGEST_MATCH, end + 1) + 1)
        if text[end + 1 - length : end + 1] == text[len(text) - length :]
    ]
    longest = {end: length for length, end in sorted(places)}
    ranked = sorted(((length, end) for end, length in longest.items()), reverse=True)
    followed = [(length, (text[end + 1 :] * depth)[:depth]) for length, end in ranked]
    return best_paths(followed, paths, vocab_size)


def best_paths(
    followed: Sequence[tuple[int, list[int]]], sizes: tuple[int, int], vocab_size: int
) -> Paths:
    """Of classes of matches' lengths, and D tokens that follow each, the best match first."""
    (num_paths, depth), paths, classes = sizes, list[list[int]](), list[list[int]]()
    followed = [each for each in followed if each[1][0] < vocab_size]
    for length, path in followed:
        if len(paths) < num_paths and path[0] not in [other[0] for other in paths]:
            says = [PARTED] + [ALONE] * depth
            if not paths:
                second = next((p for n, p in followed[1:2] if n == length), None)
                same = [] if second is None else [a == b for a, b in zip(path, second, strict=True)]
                parts = same.index(False) if False in same else len(same)
                says = [AGREED] * parts + [PARTED if same else ALONE] + [ALONE] * depth
            end = [*(0 <= token < vocab_size for token in path), False].index(False)
            paths.append(path[:end] + [-1] * (depth - end))
            of_tokens = [length + LENGTH_CLASSES * each for each in says[:end]]
            classes.append(of_tokens + [0] * (depth - end))
    missing = num_paths - len(paths)
    return paths + [[-1] * depth] * missing, classes + [[0] * depth] * missing


def joined(explored: ExploredNodes, matches: ContextMatches) -> tuple[ExploredNodes, torch.Tensor]:
    """`joined_nodes` of tensors: the nodes, and the classes of their matches."""
    given = explored.tokens, explored.back_pointers, explored.log_probs, *matches
    found = joined_nodes(*(part.to("cpu").contiguous().numpy() for part in given))
    *nodes, match_classes = (torch.from_numpy(part).to(matches.tokens.device) for part in found)
    return ExploredNodes(*nodes), match_classes


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
    pairs = zip(lengths.flatten().tolist(), agreeing.flatten().tolist(), strict=True)
    drawn = [[class_of(length, other, ahead) for ahead in range(depth)] for length, other in pairs]
    classes = torch.tensor(drawn).view(paths.shape).masked_fill(paths < 0, 0)
    return ExploredNodes(tokens, pointers, log_probs), ContextMatches(paths, classes)
