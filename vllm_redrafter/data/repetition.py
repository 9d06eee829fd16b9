# SPDX-License-Identifier: Apache-2.0
"""How much a text repeats itself: text that does is easy to draft."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 8


def repeated_share(texts: Sequence[Sequence[int]], n: int = NGRAM) -> float:
    """The share of n-grams of tokens that occurred before in the same text; 0 if all are shorter.

    Args:
        texts: token ids.
        n: tokens of an n-gram.
    """
    total = distinct = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return (total - distinct) / total if total else 0.0
