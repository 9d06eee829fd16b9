"""Continuations found in a text, one place at a time."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_redrafter.tree.context_matches import LONGEST_MATCH


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
