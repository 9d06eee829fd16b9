"""The picture of the ratios."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from throughput_parts.plot import plot

from redrafter_testing.benchmarks.throughput_runs import several_rows


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    plot(several_rows(), "a target on a machine", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_tasks_are_groups_and_all_of_them_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    monkeypatch.setattr(
        Axes, "set_xticks", lambda _, ticks, names: labels.extend(names), raising=True
    )
    rows = several_rows()
    tasks = [replace(row, task=task) for task in ("chat", None) for row in rows]
    plot(sorted(tasks, key=lambda row: row.concurrency), "title", tmp_path / "out.png")
    panels = len({row.temperature for row in rows})
    levels = [level for level in sorted({row.concurrency for row in rows}) for _ in range(2)]
    named = [label.split("\n")[0] for label in labels]
    of_a_panel = [
        f"{task}, {level}"
        for task, level in zip(["chat", "all"] * len(levels), levels, strict=False)
    ]
    assert named == of_a_panel * panels
