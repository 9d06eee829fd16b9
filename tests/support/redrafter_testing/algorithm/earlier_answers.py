# SPDX-License-Identifier: Apache-2.0
"""Histories of answers, and what is found in them, one place at a time."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from redrafter_testing.algorithm.context_matches import Paths, best_paths
from vllm_redrafter.tree.context_matches import LONGEST_EARLIER, LONGEST_MATCH, SHORTEST_EARLIER
from vllm_redrafter.tree.earlier_answers import EARLIER_PLACES, SEPARATOR

Given = tuple[Sequence[int], int]
"""A text's tokens, and its partition."""
_OF_PARTITION = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(-1, 2))
ANSWERS = st.lists(_OF_PARTITION, max_size=12)
"""(tokens, partition) of each; long ones have more than 32 places of some tokens."""
TEXTS = st.lists(_OF_PARTITION, min_size=1, max_size=4)


def slow_earlier(
    answers: Sequence[Given], ring: tuple[int, int], text: Given, paths: tuple[int, int], vocab: int
) -> Paths:
    """The best paths in what a ring keeps of answers: so many of them, in so many places."""
    most, places = ring
    long = [given for given in answers if given[1] >= 0 and len(given[0]) > SHORTEST_EARLIER]
    ends = [([SEPARATOR, *answer[-(places - 1) :]], of) for answer, of in long[-most:]]
    kept = [(token, of) for answer, of in ends for token in answer][-places:]
    return found_in(kept, text, paths, vocab)


def found_in(
    kept: Sequence[tuple[int, int]], text: Given, paths: tuple[int, int], vocab: int
) -> Paths:
    """The best paths in what is kept: tokens, and their partitions."""
    own, partition = text
    tokens = [token for token, _ in kept] + [SEPARATOR] * (1 + paths[1])
    found = []
    for place, (_, of) in enumerate(kept):
        longest, length = min(LONGEST_EARLIER, len(own), place + 1), 0
        while length < longest and tokens[place - length] == own[-1 - length]:
            length += 1
        if of == partition and length >= SHORTEST_EARLIER and tokens[place + 1] != SEPARATOR:
            found.append((length, place))
    followed = [
        (LONGEST_MATCH + 1 + length - SHORTEST_EARLIER, tokens[place + 1 : place + 1 + paths[1]])
        for length, place in sorted(found[-EARLIER_PLACES:], reverse=True)
    ]
    return best_paths(followed, paths, vocab)


def slow_merged(own: Paths, earlier: Paths, probabilities: torch.Tensor) -> Paths:
    """The most probable of both, own ones first among equals; [MATCH_CLASSES, D]."""
    both = [each for found in (own, earlier) for each in zip(*found, strict=True) if each[1][0]]
    both.sort(key=lambda each: -float(probabilities[each[1][0] - 1, 0]))
    by_first: dict[int, tuple[list[int], list[int]]] = {}
    for path, classes in both:
        by_first.setdefault(path[0], (path, classes))
    (num_paths, depth), best = (len(own[0]), len(own[0][0])), [*by_first.values()]
    best = (best + [([-1] * depth, [0] * depth)] * num_paths)[:num_paths]
    return [path for path, _ in best], [classes for _, classes in best]
