"""What is concluded from the times of steps."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from step_cost_parts.report import Comparison, Cost, as_json, comparisons, print_report


def cost(nodes: int, step: float, requests: int = 1) -> Cost:
    parts = {"verify": step - 1, "draft": 0.5, "accept": 0.25, "compact": 0.125, "gap": 0.125}
    measured = [{"step": step + noise, **parts} for noise in (-1, 0, 5)]
    return Cost.of("llama-7b", nodes, requests, 512, measured)


def test_the_speed_up_is_tokens_per_step_over_the_ratio() -> None:
    (found,) = comparisons([cost(0, 10), cost(32, 12), cost(32, 20, requests=8)])
    assert found == Comparison(cost(32, 12), cost(0, 10))
    assert found.ratio == pytest.approx(1.2)
    assert found.speedup(4.2) == pytest.approx(3.5)
    assert (found.cost.step, found.cost.steps) == (12, 3)


def test_the_report_and_the_results_file() -> None:
    costs = [cost(0, 10), cost(32, 12)]
    out = io.StringIO()
    print_report(costs, Console(file=out, width=200))
    text = out.getvalue()
    for expected in ("llama-7b", "1.20", "3.50", "weights here are random"):
        assert expected in text
    plain, speculated = as_json(costs)
    assert plain["ratio"] is None and speculated["ratio"] == pytest.approx(1.2)
    json.dumps(as_json(costs))
