"""What the demo makes is kept, and made once."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_redrafter.utils.files import user_cache


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/vllm-redrafter/demo`."""
    return user_cache() / "demo"


@contextmanager
def made_once(path: Path, settings: Mapping[str, Any], console: Console) -> Iterator[bool]:
    """Whether `path` has still to be made; if so, it counts as made when the body is done.

    What made it is recorded beside it: with other settings it is made anew.
    """
    record = path.with_name(f"{path.name}.made-with.json")
    if path.exists() and record.is_file() and json.loads(record.read_text()) == settings:
        console.print(f"{path.name}: made by an earlier run")
        yield False
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    # What `whole_folder` leaves when it is killed has a name of its own.
    for folder in (path, *path.parent.glob(f".{path.name}.partial-*")):
        if folder.is_dir():
            shutil.rmtree(folder)
    started = time.monotonic()
    yield True
    record.write_text(json.dumps(settings, indent=2) + "\n")
    console.print(f"{path.name}: made in {time.monotonic() - started:.0f} s")
