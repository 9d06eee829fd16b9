# SPDX-License-Identifier: Apache-2.0
"""Prompt-lookup (n-gram) matches on the host: `find_matches` of `tree/context_matches.py`."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_redrafter.tree.context_matches import LONGEST_MATCH, ContextMatches
from vllm_redrafter.utils.compiled import compiled

Array = npt.NDArray[Any]
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
        vocab_size: tokens from this on end a path.
    """
    found = _own_matches(texts, rows, num_tokens, *paths, vocab_size)
    return ContextMatches(*map(torch.from_numpy, found))


@compiled
def _own_matches(
    texts: Array, rows: Ints, num_tokens: Ints, num_paths: int, path_length: int, vocab_size: int
) -> tuple[Array, Array]:
    """Paths [R, M, D] and lengths of their matches [R, M], int64."""
    tokens = np.full((len(rows), num_paths, path_length), -1, dtype=np.int64)
    lengths = np.zeros((len(rows), num_paths), dtype=np.int64)
    places = np.zeros(num_paths, dtype=np.int64)
    for r in range(len(rows)):
        text, last, found = texts[rows[r]], num_tokens[r] - 1, lengths[r]
        for stop in range(last, 0, -BLOCK):
            start = max(stop - BLOCK, 0)
            some = 0
            for place in range(start, stop):
                some += text[place] == text[last]
            if not some:
                continue
            for place in range(stop - 1, start - 1, -1):
                if text[place] == text[last] and text[place + 1] < vocab_size:
                    _keep(text, place, last, found, places)
            if found[num_paths - 1] == LONGEST_MATCH:
                break
        for path in range(num_paths):
            place = places[path]
            for ahead in range(path_length if found[path] else 0):
                token = text[place + 1 + ahead % (last - place)]
                if token >= vocab_size:
                    break
                tokens[r, path, ahead] = token
    return tokens, lengths


@compiled
def _keep(text: Array, place: int, last: int, lengths: Array, places: Array) -> None:
    """Put a place among the best, if it is one: of each next token the longest match, the newest.

    Places come from the newest on, so that a later one is better only if its match is longer.
    """
    length = 1
    while length < min(LONGEST_MATCH, place + 1) and text[place - length] == text[last - length]:
        length += 1
    at = len(lengths) - 1
    for path in range(len(lengths)):
        if lengths[path] and text[places[path] + 1] == text[place + 1]:
            at = path
            break
    if lengths[at] >= length:
        return
    while at and lengths[at - 1] < length:
        lengths[at], places[at] = lengths[at - 1], places[at - 1]
        at -= 1
    lengths[at], places[at] = length, place
