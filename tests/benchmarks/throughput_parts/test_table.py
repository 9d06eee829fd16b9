"""The table: every figure, and a column of tasks only where there are some."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from throughput_parts.report import Row
from throughput_parts.table import print_table, same_as_plain

from redrafter_testing.benchmarks.throughput_runs import several_rows


def text_of(rows: Sequence[Row]) -> str:
    console = Console(width=40, record=True, file=io.StringIO())
    print_table(rows, {"model": "m", "dtype": "float32", "max_tokens": 8}, console)
    return console.export_text()


def printed(rows: Sequence[Row]) -> list[str]:
    """The lines of the rows."""
    return [line for line in text_of(rows).splitlines() if line.strip()[:1].isdigit()]


def test_the_table_has_every_figure_in_the_narrowest_terminal() -> None:
    lines = printed(several_rows())

    def cells(method: str) -> list[str]:
        return next(line.split(method)[1].split() for line in lines if method in line)

    assert lines[0].split()[:3] == ["0", "1", "(2.0)"]
    assert cells("plain ") == ["100", "1", "–", "1.00", "–", "–", "25%", *"–––––", "–"]
    assert cells("ngram 5") == ["125", "1.25", "–", "1.00", "–", "–", "25%", *"–––––", "yes"]
    figures = ["200", "2.00", "–", "1.00", "4.5", "–", "25%"]
    shares = ["20%", "60%", "40%", "10%", "2%"]
    assert cells("ReDrafter 2x4:6") == [*figures, *shares, "no", "(1/2)"]
    assert cells("ReDrafter 1x3:3")[:4] == ["208", "(167–250)", "2.08", "(1.67–2.50)"]
    # 1x3:3 has the best median: 2.50 in the first repeat, 1.67 in the second.
    assert cells("adaptive 4x5:12")[:7] == (
        ["200", "2.00", "1.00", "(0.80–1.20)", "1.00", "4.5", "20%"]
    )


def test_the_same_outputs_are_counted_over_all_repeats() -> None:
    row = several_rows()[1]
    assert same_as_plain(replace(row, identical=6, requests=6)) == "yes"
    assert same_as_plain(replace(row, identical=5, requests=6)) == "no (5/6)"
    assert same_as_plain(replace(row, identical=None)) == "–"


def of_task(task: str | None) -> list[Row]:
    return [replace(row, task=task) for row in several_rows()[:3]]


def test_the_total_of_a_single_task_is_not_printed_once_more() -> None:
    text = text_of([*of_task("chat"), *of_task(None)])
    assert text.count("ReDrafter 2x4:6") == 1 and "total" not in text
