# SPDX-License-Identifier: Apache-2.0
"""Progress where the output is a file."""

import io

import pytest
from rich.console import Console

from vllm_redrafter.utils import progress
from vllm_redrafter.utils.progress import progress_bar

LINES = ["0 of 5", "3 of 5, loss 2"]


def lines(clock: list[float], terminal: bool, disable: bool = False) -> list[str]:
    """What is printed of two tasks' 5 steps, 20 seconds each, but for the bars at the end."""
    said = io.StringIO()
    console = Console(file=said, force_terminal=terminal, width=80)
    with progress_bar(console, disable) as bar:
        for name in ("first", "second"):
            task = bar.add_task(name, total=5, status="")
            for step in range(5):
                clock[0] += 20
                bar.update(task, advance=1, status=f"loss {step}")
    return [line for line in said.getvalue().splitlines() if ":" in line.partition(" ")[0]]


def test_a_file_gets_each_task_s_begin_and_a_line_a_minute_and_a_terminal_the_bars_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: clock[0])
    logged = [f"{task}: {line}" for task in ("first", "second") for line in LINES]
    assert lines(clock, terminal=False) == logged
    assert lines(clock, terminal=True) == lines(clock, terminal=False, disable=True) == []
