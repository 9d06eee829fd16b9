# SPDX-License-Identifier: Apache-2.0
"""How much texts repeat themselves."""

import pytest
from throughput_parts.report import repeated_share


@pytest.mark.parametrize(
    ("outputs", "share"),
    [
        ([], 0),
        ([[1, 2, 3]], 0),
        ([[1, 2, 3, 4]], 0),
        ([[5, 5, 5, 5, 5]], 1 / 2),  # two 4-grams, the second repeats the first
        ([[1, 2, 3, 4, 1, 2, 3, 4]], 1 / 5),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0),  # not the same output
        ([[5, 5, 5, 5, 5], [1, 2, 3, 4, 5]], 1 / 4),
    ],
)
def test_repetition_is_counted_within_a_text(outputs: list[list[int]], share: float) -> None:
    assert repeated_share(outputs, n=4) == pytest.approx(share)


def test_repeated_share_counts_later_occurrences() -> None:
    assert repeated_share([[1, 2, 3, 4]], n=2) == 0.0
    # 1 2, 2 1, 1 2, 2 1: two of four were there before.
    assert repeated_share([[1, 2, 1, 2, 1]], n=2) == 0.5
    # Answers are looked at one by one, and those too short do not count.
    assert repeated_share([[1, 2, 3], [1, 2, 3], [1]], n=3) == 0.0
    assert repeated_share([]) == 0.0
