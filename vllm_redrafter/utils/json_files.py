# SPDX-License-Identifier: Apache-2.0
"""JSON that others wrote: read whole, unless it is larger or deeper than such files ever are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 16 << 20
"""The longest file that is parsed. The index of a checkpoint in hundreds of shards has a few MB."""
MOST_DIGITS = 300
"""Of an integer: a longer one may be no float any more, and raises an OverflowError wherever it
becomes one."""


def read_json(path: Path) -> Any:
    """What a file says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer than `MOST_BYTES`, or as in `parse_json`.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, and at most {MOST_BYTES:,} are read of it")
    return parse_json(path.read_bytes())


def parse_json(text: str | bytes) -> Any:
    """What a text says.

    Raises:
        ValueError: it is not JSON in UTF-8, nested too deeply, or has a number of more than
            `MOST_DIGITS` digits.
    """
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"the number {text[:8]}... has {len(text)} digits: too large")
    return int(text)
