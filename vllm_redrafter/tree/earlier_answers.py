# SPDX-License-Identifier: Apache-2.0
"""Matches in earlier answers: what other, finished requests were answered, and how it went on.

Requests of one kind are answered alike. The newest answers are kept; a *match* is a place in one
of them where the text's last tokens stand, at least SHORTEST_EARLIER of them. Texts belong to
*partitions*: no draft depends on an answer of another one, except on how much room it took.

Engines keep a ring with hash chains (`drafting/earlier_answers.py`,
`triton_kernels/earlier_answers.py`); this compares every place.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_redrafter.tree.context_matches import (
    LONGEST_EARLIER,
    LONGEST_MATCH,
    SHORTEST_EARLIER,
    ContextMatches,
    best_paths,
    lengths_at,
)

EARLIER_PLACES = 32
"""Places of a text's last SHORTEST_EARLIER tokens that are compared, the newest."""
FEWEST_PLACES, MOST_PLACES = 4096, 1 << 20
ANSWER_PLACES = 256
"""Room for an answer, on average."""
SEPARATOR = -1
"""The token before each answer."""


def num_places(most_answers: int) -> int:
    """C, the places of a ring for N answers, each a token or a separator; a power of two."""
    wanted = min(max(ANSWER_PLACES * most_answers, FEWEST_PLACES), MOST_PLACES)
    return 1 << (wanted - 1).bit_length()


class EarlierAnswers(NamedTuple):
    """The newest answers, one behind the other, the oldest first.

    Attributes:
        tokens: [P] int64; a SEPARATOR before each answer.
        partitions: [P] int64, of their requests, at least 0.
    """

    tokens: Tensor
    partitions: Tensor


def entered(
    answers: Sequence[tuple[Sequence[int], int]], most_answers: int, places: int
) -> EarlierAnswers:
    """What a ring of so many places keeps of the newest N answers, given with their partitions.

    Nothing is kept of a partition below 0, of an answer with no more than SHORTEST_EARLIER tokens,
    and of a longer one its last places - 1 tokens. The oldest one may have lost its beginning.
    """
    long = [given for given in answers if given[1] >= 0 and len(given[0]) > SHORTEST_EARLIER]
    tokens: list[int] = []
    partitions: list[int] = []
    for answer, partition in long[max(len(long) - most_answers, 0) :]:
        kept = [SEPARATOR, *answer[-(places - 1) :]]
        tokens += kept
        partitions += [partition] * len(kept)
    both = tokens[-places:], partitions[-places:]
    return EarlierAnswers(*(torch.tensor(part, dtype=torch.int64) for part in both))


def find_earlier(
    answers: EarlierAnswers,
    text: Tensor,
    num_tokens: Tensor,
    partitions: Tensor,
    paths: tuple[int, int],
    vocab_size: int,
) -> ContextMatches:
    """Find the best (M, D) = `paths` of R texts: the longest matches, of these the newest.

    A place counts where the text's last SHORTEST_EARLIER tokens stand in an answer of the text's
    partition that goes on. Of the newest EARLIER_PLACES, paths with different first tokens follow;
    they end with their answer.

    Args:
        text: [R, T] integers; what is behind a request's tokens is ignored.
        num_tokens: [R] integers, how many tokens each text has; at least 1.
        partitions: [R] integers; below 0 nothing is found.
        vocab_size: tokens from this on end a path: placeholders of an image, say.
    """
    num_paths, path_length = paths
    # Behind the newest place, nothing.
    kept, of = (pad(part, (0, path_length + 1), value=SEPARATOR).to(text) for part in answers)
    lengths = lengths_at(kept, text, num_tokens.long() - 1, LONGEST_EARLIER)
    following = kept.roll(-1)
    counts = (of == partitions[:, None]) & (lengths >= SHORTEST_EARLIER) & (following != SEPARATOR)
    newer = counts.long().flip(1).cumsum(1).flip(1)
    counts &= (newer <= EARLIER_PLACES) & (following < vocab_size)
    rank = lengths * len(kept) + torch.arange(len(kept), device=text.device)
    ahead = torch.arange(1, path_length + 1, device=text.device)
    return best_paths(
        rank.masked_fill(~counts, -1),
        lengths + LONGEST_MATCH + 1 - SHORTEST_EARLIER,
        following,
        lambda place: kept[place + ahead],
        (num_paths, vocab_size),
    )


def merged(own: ContextMatches, earlier: ContextMatches, probabilities: Tensor) -> ContextMatches:
    """The best M of M paths of own text and M of earlier answers, the most probable first.

    Own paths come first among equals. Of paths with one first token the best is kept.

    Args:
        own, earlier: [R, M, D] each.
        probabilities: [MATCH_CLASSES, D] or [R, MATCH_CLASSES, D], as for `joint_scores`.
    """
    tokens, classes = (torch.cat(both, dim=1) for both in zip(own, earlier, strict=True))
    of_classes = probabilities.expand(len(tokens), -1, -1)[:, :, 0]
    first = classes[:, :, 0]
    worth = of_classes.gather(1, (first - 1).clamp(min=0)).masked_fill(first == 0, -1.0)
    place, (mine, others) = (
        torch.arange(worth.shape[1]).to(worth),
        (worth[:, :, None], worth[:, None]),
    )
    better = (others > mine) | ((others == mine) & (place < place[:, None]))
    same = tokens[:, :, None, 0] == tokens[:, None, :, 0]
    worth = worth.masked_fill((better & same).any(dim=2), -1.0)
    best = worth.argsort(dim=1, descending=True, stable=True)[:, : own.tokens.shape[1]]
    is_none = (worth.gather(1, best) < 0)[:, :, None]
    at = best[:, :, None].expand(-1, -1, tokens.shape[2])
    return ContextMatches(
        tokens.gather(1, at).masked_fill(is_none, -1), classes.gather(1, at).masked_fill(is_none, 0)
    )
