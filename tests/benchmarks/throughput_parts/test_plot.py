"""The picture of the ratios."""

from __future__ import annotations

from pathlib import Path

from throughput_parts.plot import plot

from redrafter_testing.benchmarks.throughput_runs import several_rows


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    plot(several_rows(), "a target on a machine", path)
    assert path.read_bytes().startswith(b"\x89PNG")
