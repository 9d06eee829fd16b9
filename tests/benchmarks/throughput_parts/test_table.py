# SPDX-License-Identifier: Apache-2.0
"""The table has every figure, however narrow the terminal is."""

import io

from rich.console import Console
from throughput_parts.table import print_table

from redrafter_testing.benchmarks.throughput_runs import several_rows


def test_the_table_has_every_figure_in_the_narrowest_terminal() -> None:
    console = Console(width=40, record=True, file=io.StringIO())
    print_table(several_rows(), {"model": "m", "dtype": "float32", "max_tokens": 8}, console)
    lines = [line for line in console.export_text().splitlines() if line.strip()[:1].isdigit()]

    def cells(method: str) -> list[str]:
        return next(line.split(method)[1].split() for line in lines if method in line)

    assert cells("plain ") == ["100", "1", "1.00", "–", "–", "25%", *"–––––", "–"]
    assert cells("ngram 5") == ["125", "1.25", "1.00", "–", "–", "25%", *"–––––", "yes"]
    figures = ["200", "2.00", "1.00", "4.5", "–", "25%"]
    shares = ["20%", "60%", "40%", "10%", "2%"]
    assert cells("ReDrafter 2x4:6") == [*figures, *shares, "no", "(1/2)"]
    assert cells("ReDrafter 1x3:3")[:4] == ["208", "(167–250)", "2.08", "(1.67–2.50)"]
    assert cells("adaptive 4x5:12")[:5] == ["200", "2.00", "1.00", "4.5", "20%"]
