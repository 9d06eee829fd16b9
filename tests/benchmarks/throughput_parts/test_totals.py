"""All tasks together: sums, and what the rows make of them."""

from __future__ import annotations

import pytest
from throughput_parts.engine import Generation, Run
from throughput_parts.methods import Method
from throughput_parts.report import Row, measurements, summarise
from throughput_parts.totals import with_totals

from redrafter_testing.benchmarks.throughput_runs import PARTS, run

PLAIN = Method("plain", "", (2,), None)
REDRAFTER = Method("ReDrafter", "2x4:6", (2,), {})


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


def test_a_total_is_the_sum_of_all_tasks_of_a_level_and_temperature() -> None:
    _, fast = plain_and_fast()
    many = run(7.0, [[1]], concurrency=4, task="code")
    hot = run(8.0, [[1]], temperature=0.7, task="code")
    *same, total, high, sampled = with_totals([*fast, many, hot])

    assert same == [*fast, many, hot]
    code, chat = fast
    assert total == Run(
        concurrency=2,
        temperature=0.0,
        generation=Generation(code.generation.outputs + chat.generation.outputs, 2.5, 15, 31),
        spec_decode={"drafts": 6},
        parts={name: 2 * value for name, value in PARTS.items()},
        task=None,
    )
    assert (high.concurrency, high.generation.seconds, high.parts) == (4, 7.0, None)
    assert (sampled.temperature, sampled.generation.seconds, sampled.task) == (0.7, 8.0, None)


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


def test_outputs_are_compared_with_plain_decodings_of_the_same_task() -> None:
    compared = {(row.task, row.method): (row.identical, row.requests) for row in rows()}
    assert compared["code", "ReDrafter"] == (1, 1)
    assert compared["chat", "ReDrafter"] == (1, 2)
    assert compared[None, "ReDrafter"] == (2, 3)
    assert compared[None, "plain"] == (None, 3)
