"""Results in tables, from known times."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console
from rich.table import Table
from tree_attention_parts.report import Check, Missing, judge
from tree_attention_parts.tables import (
    Footnotes,
    attention_table,
    check_table,
    step_table,
    verdict_table,
)

from redrafter_testing.benchmarks.tree_attention_results import COPY, KEPT, STEPS_KEPT


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
        step_table([STEPS_KEPT], COPY, notes),
        verdict_table(judge([KEPT], [STEPS_KEPT], COPY), "NVIDIA H200"),
        check_table([Check("tree", "a case", 1e-6, 1e-5), Check("tree", "another", 1e-4, 1e-5)]),
    )

    (line,) = [row for row in shown.splitlines() if "llama-3-8b  " in row]
    figures = ["8", "4096", "32", "90.0", "100.0", "150.0", "3600", "90%", "1.05", "2.00", "4.50"]
    assert line.split() == ["llama-3-8b", *figures]
    (line,) = [row for row in shown.splitlines() if "accept_path + compact_kv  " in row]
    assert line.split()[3:] == ["llama-7b", "8", "8x5", "32", "1.0", "15.0", "80.0"]
    assert "1.0e-06" in shown and "agrees" in shown and "DIFFERS" in shown
    assert notes.lines() == []
    assert "another GPU" not in shown
    assert "This is another GPU (A100)." in " ".join(text(verdict_table([], "A100")).split())


def test_what_failed_has_its_cell_and_its_reason() -> None:
    notes = Footnotes()
    failed = Missing("failed: LoweringException: no valid triton configs")
    rows = [
        replace(KEPT, flex=failed),
        replace(KEPT, nodes="64", flex=failed, beams=Missing("skipped: 9 GB")),
        replace(KEPT, nodes="4", tree=Missing("failed: InterpreterError: x")),
    ]
    shown = text(attention_table(rows, COPY, notes))

    first, second, third = (row for row in shown.splitlines() if "llama-3-8b  " in row)
    assert first.split()[-3:] == ["failed", "(1)", "4.50"]
    assert second.split()[-4:] == ["failed", "(1)", "skipped", "(2)"]
    assert third.count("failed (3)") == 4
    assert notes.lines()[:2] == [f"(1) {failed.reason}", "(2) skipped: 9 GB"]
