# SPDX-License-Identifier: Apache-2.0
"""The progress bar of everything that takes long."""

from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

SECONDS_PER_LINE = 60.0


class _LoggedProgress(Progress):
    """A bar on a terminal; elsewhere a line at first, and at an update a minute after the last."""

    def add_task(self, *args: Any, **kwargs: Any) -> TaskID:
        task_id = super().add_task(*args, **kwargs)
        self.update(task_id)
        return task_id

    def update(self, task_id: TaskID, *args: Any, **kwargs: Any) -> None:
        super().update(task_id, *args, **kwargs)
        task, now = self._tasks[task_id], monotonic()
        if self.console.is_terminal or self.disable or now < task.fields.get("due", now):
            return
        task.fields["due"] = now + SECONDS_PER_LINE
        total = "" if task.total is None else f" of {task.total:.0f}"
        status = task.fields["status"]
        line = f"{task.description}: {task.completed:.0f}{total}{status and f', {status}'}"
        self.console.print(line, markup=False)


def progress_bar(console: Console | None = None, disable: bool = False) -> Progress:
    """A progress bar; each of its tasks needs a `status`, a few words that it ends with."""
    return _LoggedProgress(
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
