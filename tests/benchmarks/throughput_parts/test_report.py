# SPDX-License-Identifier: Apache-2.0
"""Measurements, and the rows that are made of them."""

import pytest
from throughput_parts.engine import Generation, Run
from throughput_parts.methods import Method
from throughput_parts.report import Row, measurements, summarise, with_totals

from redrafter_testing.benchmarks.throughput_runs import PARTS, measured, run


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


PLAIN = Method("plain", "", None)
REDRAFTER = Method("ReDrafter", "2x4:6", {})


def of_task(task: str, seconds: float, request_steps: int, outputs: list[list[int]]) -> Run:
    made = Generation(outputs, seconds, request_steps // 2, request_steps)
    return Run(2, 0.0, made, {"drafts": 3}, PARTS, task)


def plain_and_fast() -> tuple[list[Run], list[Run]]:
    """Code is drafted well, chat is not; one answer of the chat differs."""
    chat, code = [[1] * 10, [2] * 10], [[3] * 40]
    plain = [of_task("code", 4.0, 40, code), of_task("chat", 2.0, 20, chat)]
    other_chat = [[1] * 10, [2] * 9 + [5]]
    fast = [of_task("code", 1.0, 14, code), of_task("chat", 1.5, 17, other_chat)]
    return plain, fast


def rows() -> list[Row]:
    plain, fast = map(with_totals, plain_and_fast())
    return summarise(
        [*measurements(PLAIN, 0, plain, plain), *measurements(REDRAFTER, 0, fast, plain)]
    )


def test_figures_in_total_are_those_of_the_sums() -> None:
    """60 tokens in 6 seconds, and in 2.5: not the mean of × 4 and × 1.33."""
    code, chat, plain, total = (rows()[i] for i in (1, 3, 4, 5))

    assert (code.ratio.median, chat.ratio.median) == pytest.approx((4, 4 / 3))
    assert plain.tokens_per_second.median == 10
    assert total.tokens_per_second.median == pytest.approx(24)
    assert total.ratio.median == pytest.approx(2.4)
    # The first token of each of the three requests is no decoding step.
    assert code.tokens_per_step == pytest.approx(39 / 13)
    assert chat.tokens_per_step == pytest.approx(18 / 15)
    assert total.tokens_per_step == pytest.approx(57 / 28)
