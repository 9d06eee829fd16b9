"""The progress bar of everything that takes long."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column


def progress_bar(console: Console | None = None, disable: bool = False) -> Progress:
    """A progress bar; each of its tasks needs a `status`, a few words that it ends with.

    Args:
        console: where it is shown; None for rich's own.
        disable: show nothing.
    """
    return Progress(
        TextColumn("{task.description}"),
        # The bar takes what the rest leaves: on a narrow screen it shrinks, and no figure is cut.
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        MofNCompleteColumn(),
        # What is left; once all is done, how long it took.
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[status]}"),
        console=console,
        disable=disable,
        expand=True,
    )
