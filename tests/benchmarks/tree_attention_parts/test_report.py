"""Results in tables, from known times."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table
from tree_attention_parts.report import Check, attention_table, check_table

from redrafter_testing.benchmarks.tree_attention_results import COPY, KEPT


def text(*tables: Table) -> str:
    console = Console(width=200, record=True, file=StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_tables_show_every_figure() -> None:
    shown = text(
        attention_table([KEPT], COPY),
        check_table([Check("tree", "a case", 1e-6, 1e-5), Check("tree", "another", 1e-4, 1e-5)]),
    )

    (line,) = [row for row in shown.splitlines() if "llama-3-8b" in row]
    figures = ["8", "4096", "32", "90.0", "100.0", "3600", "90%", "1.05", "4.50"]
    assert line.replace("│", " ").split() == ["llama-3-8b", *figures]
    assert "1.0e-06" in shown and "agrees" in shown and "DIFFERS" in shown
