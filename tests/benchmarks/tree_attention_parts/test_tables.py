"""Results in tables, from known times."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console
from rich.table import Table
from tree_attention_parts.report import Check, Missing
from tree_attention_parts.tables import (
    Footnotes,
    attention_table,
    check_table,
)

from redrafter_testing.benchmarks.tree_attention_results import COPY, KEPT


def text(*tables: Table) -> str:
    console = Console(width=200, file=StringIO(), color_system=None)
    for table in tables:
        console.print(table)
    written = console.file
    assert isinstance(written, StringIO)
    return written.getvalue()


def test_tables_show_every_figure() -> None:
    notes = Footnotes()
    shown = text(
        attention_table([KEPT], COPY, notes),
        check_table([Check("tree", "a case", 1e-6, 1e-5), Check("tree", "another", 1e-4, 1e-5)]),
    )

    (line,) = [row for row in shown.splitlines() if "llama-3-8b  " in row]
    figures = ["8", "4096", "32", "90.0", "100.0", "150.0", "3600", "90%", "1.05", "4.50"]
    assert line.split() == ["llama-3-8b", *figures]
    assert "1.0e-06" in shown and "agrees" in shown and "DIFFERS" in shown
    assert notes.lines() == []


def test_what_failed_has_its_cell_and_its_reason() -> None:
    notes = Footnotes()
    failed = Missing("failed: OutOfResources: shared memory")
    rows = [
        replace(KEPT, beams=failed),
        replace(KEPT, nodes="64", one_node=failed, beams=Missing("skipped: 9 GB")),
        replace(KEPT, nodes="4", tree=Missing("failed: InterpreterError: x")),
    ]
    shown = text(attention_table(rows, COPY, notes))

    first, second, third = (row for row in shown.splitlines() if "llama-3-8b  " in row)
    assert first.split()[-3:] == ["1.05", "failed", "(1)"]
    assert second.split()[-4:] == ["failed", "(1)", "skipped", "(2)"]
    assert third.count("failed (3)") == 3
    assert notes.lines()[:2] == [f"(1) {failed.reason}", "(2) skipped: 9 GB"]
