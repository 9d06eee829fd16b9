# SPDX-License-Identifier: Apache-2.0
"""Prompt-lookup (n-gram) matches in a request's own text, found on the host."""

import numpy as np
import numpy.typing as npt
import torch

from vllm_redrafter.tree.context_matches import (
    AGREED,
    LENGTH_CLASSES,
    LONGEST_MATCH,
    PARTED,
    ContextMatches,
)
from vllm_redrafter.utils.compiled import Array, compiled

Ints = npt.NDArray[np.int64]

BLOCK = 64
"""Tokens that are compared at once: most places do not even end with the text's last token."""


def own_matches(
    texts: Array, rows: Ints, num_tokens: Ints, paths: tuple[int, int], vocab_size: int
) -> ContextMatches:
    """Find the best (M, D) = `paths` of R texts, which are read once, from their ends on.

    Args:
        texts: [any, T] int32.
        rows: [R], of the texts.
        num_tokens: [R], how many tokens each has.
        vocab_size: tokens from this on end a path: placeholders of an image, say.
    """
    found = _own_matches(texts, rows, num_tokens, *paths, vocab_size)
    return ContextMatches(*map(torch.from_numpy, found))


@compiled
def _own_matches(
    texts: Array, rows: Ints, num_tokens: Ints, num_paths: int, path_length: int, vocab_size: int
) -> tuple[Array, Array]:
    """Paths and the classes of their tokens, [R, M, D] int64."""
    tokens = np.full((len(rows), num_paths, path_length), -1, dtype=np.int64)
    classes = np.zeros(tokens.shape, dtype=np.int64)
    # Of the paths, and of what the first one is compared with.
    lengths, places = np.zeros((2, num_paths + 1), dtype=np.int64)
    for r in range(len(rows)):
        text, last = texts[rows[r]], num_tokens[r] - 1
        lengths[:] = 0
        for stop in range(last, 0, -BLOCK):
            start = max(stop - BLOCK, 0)
            some = 0
            for place in range(start, stop):
                some += text[place] == text[last]
            if not some:
                continue
            for place in range(stop - 1, start - 1, -1):
                if text[place] == text[last] and text[place + 1] < vocab_size:
                    length = 1
                    while length < min(LONGEST_MATCH, place + 1) and (
                        text[place - length] == text[last - length]
                    ):
                        length += 1
                    keep_place(text, place, length, lengths, places)
            if lengths[num_paths - 1 :].min() == LONGEST_MATCH:
                break
        other = places[num_paths]
        for path in range(num_paths):
            place, agreeing = places[path], 0
            if not path and 0 < lengths[0] == lengths[num_paths]:
                while agreeing < path_length and (
                    text[place + 1 + agreeing % (last - place)]
                    == text[other + 1 + agreeing % (last - other)]
                ):
                    agreeing += 1
            elif not path:
                agreeing = -1
            for ahead in range(path_length if lengths[path] else 0):
                token = text[place + 1 + ahead % (last - place)]
                if token >= vocab_size:
                    break
                tokens[r, path, ahead] = token
                classes[r, path, ahead] = class_of(lengths[path], agreeing, ahead)
    return tokens, classes


@compiled
def class_of(length: int, agreeing: int, ahead: int) -> int:
    """The class of a path's token; see `ContextMatches`.

    Args:
        length: the match's class by its length alone.
        agreeing: how many tokens the second best place has as well, if its match is as long; -1
            without one. Only the first path is compared: the others part from it at once, by 0.
        ahead: tokens of the path before this one.
    """
    if ahead < agreeing:
        return length + AGREED * LENGTH_CLASSES
    return length + (PARTED * LENGTH_CLASSES if ahead == agreeing else 0)


@compiled
def keep_place(text: Array, place: int, length: int, lengths: Array, places: Array) -> None:
    """Put a place among the best, if it is one: of each next token the longest match, the newest.

    Places come from the newest on, so that a later one is better only if its match is longer.

    Args:
        text: read at places modulo its size.
        lengths, places: [M + 1], of the paths, and of the second best place of all.
    """
    last = len(lengths) - 1
    if length > lengths[0]:
        lengths[last], places[last] = lengths[0], places[0]
    elif length > lengths[last]:
        lengths[last], places[last] = length, place
    at, size = last - 1, len(text)
    for path in range(last):
        if lengths[path] and text[(places[path] + 1) % size] == text[(place + 1) % size]:
            at = path
            break
    if lengths[at] >= length:
        return
    while at and lengths[at - 1] < length:
        lengths[at], places[at] = lengths[at - 1], places[at - 1]
        at -= 1
    lengths[at], places[at] = length, place
