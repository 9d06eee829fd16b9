# SPDX-License-Identifier: Apache-2.0
"""Where a benchmark's figures go: a JSON file, and tables on the screen."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

TABLE_WIDTH = 160
"""Of wide tables that go into a file or a pipe, which have no width of their own."""


def write(path: Path | None, record: dict[str, Any]) -> None:
    """Write a results file; nothing without a path.

    Raises:
        ValueError: the record has an infinite number or a NaN, which JSON has not.
    """
    if path is not None:
        path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def wide_console() -> Console:
    """A console for wide tables: as wide as the terminal, or TABLE_WIDTH where there is none."""
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
