# SPDX-License-Identifier: Apache-2.0
"""JSON from others' files: read whole, unless it is larger or deeper than such files ever are."""

import json
from pathlib import Path
from typing import Any

from vllm_redrafter.utils.errors import ConfigError

MOST_BYTES = 16 << 20
"""Of a file. The index of a checkpoint in hundreds of shards has a few MB."""
MOST_DIGITS = 300
"""Of an integer. A longer one raises an OverflowError wherever it becomes a float."""


def read_json(path: Path) -> Any:
    """Parse a file; OSError or ValueError where it cannot be read, or is not JSON (UTF-8)."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, and at most {MOST_BYTES:,} are read of it")
    return parse_json(path.read_bytes())


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ConfigError where it has none."""
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def parse_json(text: str | bytes) -> Any:
    """Parse a text; ValueError where it is not JSON (UTF-8), too deep, or has a huge integer."""
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"the number {text[:8]}... has {len(text)} digits: too large")
    return int(text)
