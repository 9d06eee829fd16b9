"""JSON that others wrote: read whole, unless it is larger or deeper than such files ever are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 16 << 20
"""The longest file that is parsed. The index of a checkpoint in hundreds of shards has a few MB."""


def read_json(path: Path) -> Any:
    """What a file says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON in UTF-8, nested too deeply, or longer than `MOST_BYTES`.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, and at most {MOST_BYTES:,} are read of it")
    return parse_json(path.read_bytes())


def parse_json(text: str | bytes) -> Any:
    """What a text says.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error
