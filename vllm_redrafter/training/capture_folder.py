"""The folder that `capture` writes to: its space, and files that pass through."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_redrafter.utils.errors import ConfigError

GIB = 2**30


def check_space(output: Path, needed: int) -> None:
    free = shutil.disk_usage(output).free
    if free < needed:
        raise ConfigError(
            f"--output {output}: {needed / GIB:.1f} GiB are to be written and {free / GIB:.1f} "
            "GiB are free: give a folder on a larger disk, lower --max-length, or train on less "
            "data"
        )


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder for passing files; it is gone afterwards."""
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
