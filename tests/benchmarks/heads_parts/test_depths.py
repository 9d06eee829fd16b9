"""What a head gains by depth."""

from __future__ import annotations

from typing import Any

import pytest
from heads_parts.depths import exchanged, rates_of, table, tokens_per_step


def run_of(head: str, by_depth: list[int], steps: int = 100, seed: int = 0) -> dict[str, Any]:
    counts = {"steps": steps, "tokens": steps + sum(by_depth), "by_depth": by_depth}
    return {"head": head, "loss": "mix", "seed": seed, "texts": {"greedy": {"4x2:4": counts}}}


def test_tokens_are_those_that_were_counted() -> None:
    run = run_of("gated", [50, 20])
    assert rates_of([run], "greedy", "4x2:4") == [0.5, 0.4]
    assert tokens_per_step([0.5, 0.4]) == pytest.approx(170 / 100)


def test_the_rates_of_a_head_are_its_seeds_mean_and_zero_where_nothing_was_right() -> None:
    runs = [run_of("gated", [50, 20]), run_of("gated", [0, 0], seed=1)]
    assert rates_of(runs, "greedy", "4x2:4") == [0.25, 0.2]


def test_exchanged_rates_are_each_worth_their_own() -> None:
    found = exchanged([0.5, 0.4], [0.25, 0.2])
    other = 1 + 0.25 + 0.05
    assert found["as it is"] == pytest.approx((1 + 0.5 + 0.2) / other)
    assert found["its first alone"] == pytest.approx((1 + 0.5 + 0.1) / other)
    assert found["its later ones alone"] == pytest.approx((1 + 0.25 + 0.1) / other)
    assert found["later ones as its first"] == pytest.approx((1 + 0.5 + 0.25) / other)


def test_heads_are_compared_where_the_other_was_measured_too() -> None:
    unmatched = run_of("gated", [50, 20])
    unmatched["texts"]["sampled"] = unmatched["texts"]["greedy"]
    made = table([unmatched, run_of("Medusa", [25, 5])], "Medusa")
    columns = {column.header: list(column.cells) for column in made.columns}
    assert columns["head"] == ["gated", "Medusa"]
    assert columns["text"] == ["greedy", "greedy"]
    assert columns["as it is"] == ["1.31", "1.00"]


def test_without_the_other_head_there_is_nothing_to_compare() -> None:
    assert table([run_of("gated", [50, 20])], "Medusa").row_count == 0
