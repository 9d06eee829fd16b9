# SPDX-License-Identifier: Apache-2.0
"""The rows for a terminal, with every figure."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from throughput_parts.report import NGRAM, Row, Spread

FIGURES = ("tok/s", "× plain", "tok/step", "nodes", "undrafted", "repeated")


def table(rows: Sequence[Row], settings: Mapping[str, object]) -> Table:
    """Rows of one level and one task stand together, between lines."""
    tasks = {row.task for row in rows} - {None}
    drawn = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
        title=f"{settings['model']}, {settings['dtype']}, up to {settings['max_tokens']} tokens",
        caption=CAPTION,
        caption_justify="left",
    )
    for name in ("T", "requests"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for name in ("task", "method") if tasks else ("method",):
        drawn.add_column(name, no_wrap=True)
    for name in (*FIGURES, "same"):
        drawn.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        at = (row.temperature, row.concurrency, row.task)
        if previous not in (None, at):
            drawn.add_section()
        previous = at
        drawn.add_row(
            f"{row.temperature:g}",
            str(row.concurrency),
            *([escape(row.task or "total")] if tasks else []),
            f"{row.method} {row.shape}".strip(),
            _spread(row.tokens_per_second, ".0f"),
            "1" if row.method == "plain" else _spread(row.ratio, ".2f"),
            _known(row.tokens_per_step, ".2f"),
            _known(row.nodes, ".1f"),
            _known(row.undrafted, ".0%"),
            f"{row.repeated_ngrams:.0%}",
            same_as_plain(row),
        )
    return drawn


CAPTION = (
    "requests: in flight. "
    "tok/s, × plain: median over repeats (lowest–highest); × plain within a repeat. "
    "tok/step: per request and decoding step. "
    "nodes: verified per request, where any were; undrafted: its decoding steps without a draft. "
    f"repeated: share of the output's {NGRAM}-grams that occurred before in the same output; text "
    "that repeats itself is easy to draft. "
    "same: greedy outputs identical to plain decoding's. "
    "total: the tokens of all tasks over the sum of their seconds."
)


def print_table(rows: Sequence[Row], settings: Mapping[str, object], console: Console) -> None:
    """Print all of it: in a narrow terminal lines are broken rather than figures left out."""
    drawn = table(rows, settings)
    whole = drawn.__rich_measure__(console, console.options.update(max_width=1000)).maximum
    console.width = max(console.width, whole)
    console.print(drawn)


def _known(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _spread(values: Spread, form: str) -> str:
    if values.low == values.high:
        return f"{values.median:{form}}"
    return f"{values.median:{form}} ({values.low:{form}}–{values.high:{form}})"


def same_as_plain(row: Row) -> str:
    """Are the outputs those of plain decoding? How many are, where not all."""
    if row.identical is None:
        return "–"
    return "yes" if row.identical == row.requests else f"no ({row.identical}/{row.requests})"
