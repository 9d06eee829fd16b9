# SPDX-License-Identifier: Apache-2.0
"""Measurements, and the rows that are made of them."""

import pytest
from throughput_parts.methods import Method
from throughput_parts.report import measurements, summarise

from redrafter_testing.benchmarks.throughput_runs import measured, run


def test_outputs_are_compared_with_the_same_repeats_plain_decoding() -> None:
    redrafter = Method("ReDrafter", "2x4:6", {})
    plain = [run(1.0, [[1, 2], [3, 4]]), run(1.0, [[9], [9]], temperature=0.7)]
    runs = [run(0.5, [[1, 2], [3, 5]]), run(0.5, [[1], [1]], temperature=0.7)]

    greedy, sampled = measurements(redrafter, 1, runs, plain)

    assert (greedy.identical, greedy.requests, greedy.output_tokens) == (1, 2, 4)
    assert sampled.identical is None
    assert measurements(Method("plain", "", None), 0, plain, plain)[0].identical is None


def test_shares_are_of_the_wall_time_and_verify_is_without_attention() -> None:
    assert measured("ReDrafter", seconds=2.0).shares == pytest.approx(
        {"draft": 0.05, "verify": 0.15, "attention": 0.1, "accept": 0.025, "compact": 0.005}
    )
    assert measured().shares is None


def test_ratios_are_taken_within_a_repeat() -> None:
    """The machine slows down threefold; a ratio of medians would say 1.5, not 2."""
    plain_seconds, fast_seconds = [1.0, 1.0, 3.0], [0.5, 1.5, 1.5]
    rows = summarise(
        [measured(repeat=i, seconds=s) for i, s in enumerate(plain_seconds)]
        + [measured("ReDrafter", "2x4:6", repeat=i, seconds=s) for i, s in enumerate(fast_seconds)]
    )

    assert [row.method for row in rows] == ["plain", "ReDrafter"]
    assert rows[0].ratio == (1, 1, 1)
    assert rows[1].ratio == pytest.approx((2, 2 / 3, 2))
    assert rows[1].tokens_per_second == pytest.approx((100 / 1.5, 100 / 1.5, 200))
