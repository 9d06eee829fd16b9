"""The progress bar of everything that takes long."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress_bar(console: Console | None = None, disable: bool = False) -> Progress:
    """A progress bar; each of its tasks needs a `status`, a few words that it ends with.

    Args:
        console: where it is shown; None for rich's own.
        disable: show nothing.
    """
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
        disable=disable,
    )
