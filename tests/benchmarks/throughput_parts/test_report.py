"""Measurements, and the rows that are made of them."""

from __future__ import annotations

import pytest
from throughput_parts.methods import Method
from throughput_parts.report import measurements, summarise

from redrafter_testing.benchmarks.throughput_runs import (
    PARTS,
    UNDRAFTED,
    measured,
    run,
    several_rows,
)


def test_outputs_are_compared_with_the_same_repeats_plain_decoding() -> None:
    redrafter = Method("ReDrafter", "2x4:6", (2,), {})
    plain = [run(1.0, [[1, 2], [3, 4]]), run(1.0, [[9], [9]], temperature=0.7)]
    runs = [run(0.5, [[1, 2], [3, 5]]), run(0.5, [[1], [1]], temperature=0.7)]

    greedy, sampled = measurements(redrafter, 1, runs, plain)

    assert (greedy.identical, greedy.requests, greedy.output_tokens) == (1, 2, 4)
    assert sampled.identical is None
    assert measurements(Method("plain", "", (2,), None), 0, plain, plain)[0].identical is None


def test_tokens_per_step_leaves_out_the_prompts_step() -> None:
    # Two requests of 41 tokens each, in 1 + 10 steps each.
    assert measured(output_tokens=82, request_steps=22).tokens_per_step == 4
    assert measured(output_tokens=2, request_steps=2).tokens_per_step is None


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


def test_adaptive_is_compared_with_the_shape_that_is_the_best_over_all_repeats() -> None:
    """Not with the best of each repeat, in which another shape's luck would count."""
    seconds = {"2x4:6": [0.5, 0.5, 0.2], "1x3:3": [0.4, 0.4, 0.6], "4x5:12": [0.4, 0.2, 0.3]}
    made = [measured(repeat=i) for i in range(3)]
    for shape, values in seconds.items():
        method = "adaptive" if shape == "4x5:12" else "ReDrafter"
        made += [measured(method, shape, repeat=i, seconds=s) for i, s in enumerate(values)]
    rows = {row.shape: row for row in summarise(made)}

    assert rows["4x5:12"].over_fixed == pytest.approx((2, 1, 2))
    assert rows["2x4:6"].over_fixed is None
    alone = summarise([m for m in made if m.method != "ReDrafter"])
    assert [row.over_fixed for row in alone] == [None, None]


def test_budgets_are_those_of_the_steps_that_drafted() -> None:
    assert measured("adaptive", "4x5:12", parts=PARTS | UNDRAFTED).nodes == 4.5
    assert measured("adaptive", "4x5:12", parts=PARTS | UNDRAFTED).undrafted == 0.2
    assert measured("ReDrafter", "2x4:6").undrafted is None
    never = {"steps": 0, "verifications": 0, "undrafted_steps": 50}
    assert measured("adaptive", "4x5:12", parts=PARTS | never).nodes is None
    assert measured("adaptive", "4x5:12", parts=PARTS | never).undrafted == 1
    assert (measured().nodes, measured().undrafted) == (None, None)


def test_rows_are_ordered_for_reading() -> None:
    rows = several_rows()
    assert [(r.temperature, r.concurrency, r.method, r.shape) for r in rows[:5]] == [
        (0, 1, "plain", ""),
        (0, 1, "ngram", "5"),
        (0, 1, "ReDrafter", "2x4:6"),
        (0, 1, "ReDrafter", "1x3:3"),
        (0, 1, "adaptive", "4x5:12"),
    ]
    assert (rows[5].concurrency, rows[5].method) == (8, "plain")
    assert len(rows) == 20
