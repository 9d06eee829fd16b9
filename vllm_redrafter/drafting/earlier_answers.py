# SPDX-License-Identifier: Apache-2.0
"""The newest answers in a ring with hash chains, and what is found there: on the host.

Places count up for ever; place p is at index p % C. A place with SHORTEST_EARLIER tokens up to it
in its answer, and one behind it, is linked: its hash's head names the newest such place, `before`
the next older one. Nothing is deleted: places below the oldest do not exist.
"""

import secrets
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_redrafter.drafting.own_matches import class_of, keep_place
from vllm_redrafter.tree.context_matches import (
    LONGEST_EARLIER,
    LONGEST_MATCH,
    SHORTEST_EARLIER,
    ContextMatches,
)
from vllm_redrafter.tree.earlier_answers import EARLIER_PLACES, SEPARATOR, num_places
from vllm_redrafter.utils.compiled import Array, compiled

END, COUNT = range(2)
MULTIPLIER = 0x9E3779B1
"""Odd, of 32 bits, with as many ones as zeros (Knuth's multiplicative hashing)."""


class _Ring(NamedTuple):
    """C places of the newest N answers.

    Attributes:
        tokens, partitions: [C] int32.
        before: [C] int64, an older place of the same hash.
        heads: [2 C] int64, the newest place of each hash; -1 for none.
        starts: [N] int64, where the answer of number i begins, at i % N.
        state: [2] int64, END and COUNT: places and answers ever written.
    """

    tokens: Array
    partitions: Array
    before: Array
    heads: Array
    starts: Array
    state: Array
    seed: int
    vocab_size: int


class AnswerStore:
    """The newest answers of an engine's requests, and the paths that they give to others."""

    def __init__(self, most_answers: int, vocab_size: int, places: int | None = None) -> None:
        """For N answers in C places; a path ends before what is no token of the vocabulary."""
        size = places or num_places(most_answers)
        tokens, before = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int64)
        heads, starts = np.full(2 * size, -1), np.zeros(most_answers, dtype=np.int64)
        state = np.zeros(2, dtype=np.int64)
        # Texts that were made to share a hash would make all requests slow.
        own = secrets.randbits(32), vocab_size
        self._ring = _Ring(tokens, np.zeros_like(tokens), before, heads, starts, state, *own)

    def enter(self, tokens: npt.NDArray[np.int32], partition: int) -> None:
        """Enter an answer [any], or its end where it is longer than the ring.

        Nothing is entered of a partition below 0, or of up to SHORTEST_EARLIER tokens.
        """
        if partition >= 0 and len(tokens) > SHORTEST_EARLIER:
            _enter(self._ring, tokens, partition)

    def clear(self) -> None:
        """Forget all answers."""
        self._ring.state[:] = 0
        self._ring.heads[:] = -1

    def with_earlier(
        self,
        own: ContextMatches,
        texts: tuple[Array, Array, Array],
        partitions: npt.NDArray[np.int64],
        sampled: npt.NDArray[np.bool_],
        probabilities: npt.NDArray[np.float32],
    ) -> ContextMatches:
        """The best M of the own paths of R requests and of M that earlier answers give.

        The most probable ones come first, own paths first among equals. Of paths with one first
        token the best is kept.

        Args:
            texts: a table [any, T] int32, its rows [R] and numbers of tokens [R] int64, as for
                `own_matches`.
            partitions: [R]; below 0 for requests that get nothing of others.
            sampled: [R], requests that sample.
            probabilities: see `MatchAcceptance`.
        """
        paths = own.tokens.numpy(), own.classes.numpy()
        found = _with_earlier(self._ring, paths, texts, (partitions, sampled), probabilities)
        return ContextMatches(*map(torch.from_numpy, found))


@compiled
def _head(ring: _Ring, partition: int, text: Array, last: int) -> int:
    """Where in `heads` the SHORTEST_EARLIER tokens up to `last` of a text are, or of the ring."""
    mask = np.uint64(0xFFFFFFFF)
    key = np.uint64(ring.seed)
    for back in range(SHORTEST_EARLIER, -1, -1):
        value = partition
        if back < SHORTEST_EARLIER:
            value = text[(last - back) % len(text)]
        key = ((key ^ (np.uint64(value) & mask)) * np.uint64(MULTIPLIER)) & mask
        key ^= key >> np.uint64(15)
    return np.int64(key & np.uint64(len(ring.heads) - 1))  # type: ignore[return-value]


@compiled
def _enter(ring: _Ring, answer: Array, partition: int) -> None:
    mask, start = len(ring.tokens) - 1, ring.state[END]
    ring.tokens[start & mask] = SEPARATOR
    end = start + 1
    for at in range(max(len(answer) - mask, 0), len(answer)):
        ring.tokens[end & mask] = answer[at]
        end += 1
    for place in range(start, end):
        ring.partitions[place & mask] = partition
    for place in range(start + SHORTEST_EARLIER, end - 1):
        head = _head(ring, partition, ring.tokens, place)
        ring.before[place & mask] = ring.heads[head]
        ring.heads[head] = place
    ring.starts[ring.state[COUNT] % len(ring.starts)] = start
    ring.state[END] = end
    ring.state[COUNT] += 1


@compiled
def _find(
    ring: _Ring, text: Array, last: int, partition: int, places: Array, lengths: Array
) -> None:
    """The M best places and the second best of all, and tokens of their matches; 0 for none."""
    mask, count, size = len(ring.tokens) - 1, ring.state[COUNT], len(ring.starts)
    lengths[:] = 0
    if partition < 0 or last < SHORTEST_EARLIER - 1:
        return
    oldest = max(ring.state[END] - len(ring.tokens), 0)
    if count > size:
        oldest = max(oldest, ring.starts[count % size])
    place, seen = ring.heads[_head(ring, partition, text, last)], 0
    while place >= oldest and seen < EARLIER_PLACES:
        length, longest = 0, min(LONGEST_EARLIER, last + 1, place + 1 - oldest)
        if ring.partitions[place & mask] == partition:
            while length < longest and ring.tokens[(place - length) & mask] == text[last - length]:
                length += 1
        following = ring.tokens[(place + 1) & mask]
        if length >= SHORTEST_EARLIER:
            seen += 1
        if length >= SHORTEST_EARLIER and following < ring.vocab_size:
            keep_place(ring.tokens, place, length, lengths, places)
        place = ring.before[place & mask]


@compiled
def _ahead(ring: _Ring, place: int, ahead: int) -> int:
    """What stands so far behind the token that follows a place; SEPARATOR behind the newest."""
    at = place + 1 + ahead
    if at >= ring.state[END]:
        return SEPARATOR
    return ring.tokens[at & (len(ring.tokens) - 1)]


@compiled
def _with_earlier(
    ring: _Ring,
    own: tuple[Array, Array],
    texts: tuple[Array, Array, Array],
    of_requests: tuple[Array, Array],
    probabilities: Array,
) -> tuple[Array, Array]:
    (own_tokens, own_classes), (table, rows, num_tokens) = own, texts
    (partitions, sampled), mask = of_requests, len(ring.tokens) - 1
    requests, num_paths, depth = own_tokens.shape
    tokens = np.full(own_tokens.shape, -1, dtype=np.int64)
    classes = np.zeros(own_classes.shape, dtype=np.int64)
    places, lengths = np.zeros((2, num_paths + 1), dtype=np.int64)
    # Of own paths, then of earlier ones: the first token and the class, 0 if it is out.
    first, left = np.zeros((2, 2 * num_paths), dtype=np.int64)
    for r in range(requests):
        kind = 1 if sampled[r] else 0
        _find(ring, table[rows[r]], num_tokens[r] - 1, partitions[r], places, lengths)
        agreeing = -1
        if 0 < lengths[0] == lengths[num_paths]:
            agreeing = 0
            while agreeing < depth and (
                _ahead(ring, places[0], agreeing) == _ahead(ring, places[num_paths], agreeing)
            ):
                agreeing += 1
        for path in range(num_paths):
            other = num_paths + path
            first[path], left[path] = own_tokens[r, path, 0], own_classes[r, path, 0]
            first[other], left[other] = ring.tokens[(places[path] + 1) & mask], 0
            if lengths[path]:
                length = LONGEST_MATCH + 1 + lengths[path] - SHORTEST_EARLIER
                left[other] = class_of(length, 0 if path else agreeing, 0)
        for path in range(num_paths):
            best, most = -1, 0.0
            for other in range(2 * num_paths):
                if left[other] and probabilities[kind, left[other] - 1, 0] > most:
                    best, most = other, probabilities[kind, left[other] - 1, 0]
            if best < 0:
                break
            if best < num_paths:
                tokens[r, path], classes[r, path] = own_tokens[r, best], own_classes[r, best]
            else:
                at = best - num_paths
                length = LONGEST_MATCH + 1 + lengths[at] - SHORTEST_EARLIER
                for ahead in range(depth):
                    token = _ahead(ring, places[at], ahead)
                    if token == SEPARATOR or token >= ring.vocab_size:
                        break
                    tokens[r, path, ahead] = token
                    classes[r, path, ahead] = class_of(length, 0 if at else agreeing, ahead)
            left[first == first[best]] = 0
    return tokens, classes
