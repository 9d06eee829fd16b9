"""The folder that `capture` writes to: what it may hold, its space, who else writes to it."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_redrafter.data.hidden_states import INFO_FILE, StatesInfo
from vllm_redrafter.utils.errors import ConfigError

GIB = 2**30


def begin(output: Path, info: StatesInfo) -> None:
    """Write states.json, or find the same one there.

    Raises:
        ConfigError: the folder holds other hidden states.
    """
    if not (output / INFO_FILE).exists():
        info.save(output)
    elif different := StatesInfo.load(output).differences(info):
        raise ConfigError(
            f"--output {output} has hidden states of other data, of another target or of other "
            f"settings ({'; '.join(different)}): give another folder"
        )


def check_space(output: Path, needed: int) -> None:
    free = shutil.disk_usage(output).free
    if free < needed:
        raise ConfigError(
            f"--output {output}: {needed / GIB:.1f} GiB are to be written and {free / GIB:.1f} "
            "GiB are free: give a folder on a larger disk, lower --max-length, or train on less "
            "data"
        )


@contextmanager
def alone(scratch: Path) -> Iterator[Path]:
    """An empty folder for this part's passing files; it is gone afterwards.

    Raises:
        ConfigError: another process is writing this part, or the folder cannot be made.
    """
    lock_file = scratch.with_suffix(".lock")
    try:
        scratch.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file.open("w")
    except OSError as error:
        raise ConfigError(f"--output {scratch.parent}: cannot be written to: {error}") from error
    with lock:
        try:
            # lockf, not flock: child processes must not inherit it. It ends with the process.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--output {scratch.parent}: another process is capturing this part; wait for it "
                "to end, or give each its own --part"
            ) from error
        except OSError:
            pass  # a file system without locks keeps nobody out
        shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
