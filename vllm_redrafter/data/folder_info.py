"""The file that says what a folder's shards are: `dataset.json`, `states.json`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import write_once
from vllm_redrafter.utils.json_files import read_json


def save_info(file: Path, info: Any) -> None:
    """Write a dataclass's fields, unless the file is there; several processes may do so at once."""
    write_once(file, (json.dumps(asdict(info), indent=2) + "\n").encode())


def read_info(file: Path, version: int, command: str) -> dict[str, Any]:
    """The fields.

    Args:
        file: the description.
        version: of the format, as `format_version` has to have it.
        command: what writes such folders.

    Raises:
        ConfigError: it is missing, no JSON, or of another format version.
    """
    try:
        values = read_json(file)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file.parent}: no {file.name} there; give a folder that {command} wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not readable as JSON: {error}") from error
    found = values.get("format_version") if isinstance(values, dict) else None
    if found != version:
        raise ConfigError(
            f"{file}: format version {found!r}, this version of vllm-redrafter reads {version}: "
            f"start {command} again with another folder, or use the version that wrote it"
        )
    return dict(values)
