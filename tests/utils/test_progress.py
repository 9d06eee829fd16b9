# SPDX-License-Identifier: Apache-2.0
"""Progress where the output is a file."""

import io

import pytest
from rich.console import Console

from vllm_redrafter.utils import progress
from vllm_redrafter.utils.progress import progress_bar


def lines(clock: list[float], terminal: bool, disable: bool = False) -> list[str]:
    """What is printed of 10 steps, a quarter of a minute each, but for the bar at the end."""
    said = io.StringIO()
    console = Console(file=said, force_terminal=terminal, width=80)
    with progress_bar(console, disable) as bar:
        task = bar.add_task("answers", total=10, status="")
        for step in range(10):
            clock[0] += 15
            bar.update(task, advance=1, status=f"loss {step}")
    return [line for line in said.getvalue().splitlines() if line.startswith("answers:")]


def test_a_file_gets_a_line_every_minute_and_a_terminal_the_bar_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: clock[0])
    assert lines(clock, terminal=False) == ["answers: 4 of 10, loss 3", "answers: 8 of 10, loss 7"]
    assert lines(clock, terminal=True) == lines(clock, terminal=False, disable=True) == []
