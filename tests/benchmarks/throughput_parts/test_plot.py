"""The picture of the ratios."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from throughput_parts import plot as drawing
from throughput_parts.plot import plot

from redrafter_testing.benchmarks.throughput_runs import several_rows


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    plot(several_rows(), "a target on a machine", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_only_totals_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str | None] = []
    monkeypatch.setattr(drawing, "_draw_panel", lambda _, rows: drawn.extend(r.task for r in rows))
    rows = several_rows()
    plot([*(replace(row, task="chat") for row in rows), *rows], "title", tmp_path / "out.png")
    assert drawn == [None] * len(rows)
