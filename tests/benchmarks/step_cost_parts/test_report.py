"""What is concluded from the times of steps."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from step_cost_parts.report import Cost, as_json, print_report


def cost(nodes: int, step: float, requests: int = 1) -> Cost:
    parts = {"verify": step - 1, "draft": 0.5, "accept": 0.25, "compact": 0.125, "gap": 0.125}
    measured = [{"step": step + noise, **parts} for noise in (-1, 0, 5)]
    return Cost.of("llama-7b", nodes, requests, 512, measured)


def test_a_cost_is_a_median_and_its_ratio_is_to_the_plain_step_of_its_kind() -> None:
    costs = [cost(0, 10), cost(32, 12), cost(0, 15, requests=8), cost(32, 21, requests=8)]
    assert (costs[1].step, costs[1].steps) == (12, 3)
    found = json.loads(json.dumps(as_json(costs)))
    assert [made["ratio"] for made in found] == pytest.approx([1, 1.2, 1, 1.4])


def test_the_report_has_every_figure() -> None:
    out = io.StringIO()
    print_report([cost(0, 10), cost(32, 12)], Console(file=out, width=200))
    (line,) = [line for line in out.getvalue().splitlines() if " 32 " in line]
    figures = ["llama-7b", "1", "512", "32", "12.00", "1.20", "0.50", "11.00", "0.25", "0.12"]
    assert line.replace("│", " ").split()[:10] == figures
