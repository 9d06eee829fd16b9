# SPDX-License-Identifier: Apache-2.0
"""A worker's counters where the server's front end can read them: a small file mapped by both.

The process that launches the engines names a directory in the environment; in each data-parallel
engine one worker makes a file there. When both ends have mapped it, the directory is deleted.
"""

import atexit
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from vllm_redrafter.drafting.stats import StepStats

DIRECTORY = "REDRAFTER_COUNTERS"
"""The environment variable that names the directory."""
COPIED_BY_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


class Counters(NamedTuple):
    """What is published: fields of StepStats, which says what they count."""

    steps: float = 0.0
    verifications: float = 0.0
    drafted_tokens: float = 0.0
    sampled_tokens: float = 0.0
    expected_tokens: float = 0.0
    undrafted_steps: float = 0.0
    matched_tokens: float = 0.0
    accepted_matched_tokens: float = 0.0
    earlier_tokens: float = 0.0
    accepted_earlier_tokens: float = 0.0
    decoding_seconds: float = 0.0
    plain_seconds: float = 0.0

    @classmethod
    def of(cls, stats: StepStats) -> Self:
        return cls._make(_read(stats))

    def since(self, earlier: Self) -> Self:
        """What was counted between `earlier` and now."""
        return type(self)(*(now - then for now, then in zip(self, earlier, strict=True)))


_read = attrgetter(*Counters._fields)
SIZE = len(Counters._fields) * np.dtype(np.float64).itemsize


def open_directory() -> None:
    """Make the directory for the engines that this process launches."""
    directory = tempfile.mkdtemp(prefix="redrafter-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ[DIRECTORY] = directory
    # Engines of Ray get of the environment what vLLM copies: its own variables, and these.
    copied = filter(None, os.environ.get(COPIED_BY_RAY, "").split(","))
    os.environ[COPIED_BY_RAY] = ",".join(dict.fromkeys([*copied, DIRECTORY]))


def close_directory() -> None:
    """Delete the directory; files stay mapped."""
    if directory := os.environ.pop(DIRECTORY, None):
        shutil.rmtree(directory, ignore_errors=True)


class Publisher:
    """The worker's end: totals since its start."""

    def __init__(self, engine: int) -> None:
        """FileNotFoundError where nobody asks for counters, or FileExistsError where another worker
        publishes as this data-parallel engine."""
        with open(_file(engine), "xb+") as opened:
            opened.truncate(SIZE)
            shared = mmap.mmap(opened.fileno(), SIZE)
        self._published = np.frombuffer(shared, dtype=np.float64)
        self._before_reset = np.zeros_like(self._published)

    @classmethod
    def if_wanted(cls, engine: int) -> Self | None:
        """None where the process that launched this one has not asked for counters."""
        with suppress(FileNotFoundError):
            return cls(engine)
        return None

    def publish(self, stats: StepStats) -> None:
        """Once per step. Readers may see a part of the fields a step ahead of the others."""
        np.add(self._before_reset, Counters.of(stats), out=self._published)

    def carry(self, stats: StepStats) -> None:
        """To be called before the statistics are reset."""
        self._before_reset += Counters.of(stats)


def subscribe(engine: int) -> Callable[[], Counters]:
    """What reads an engine's counters.

    FileNotFoundError where no worker on this machine publishes as this engine.
    """
    with open(_file(engine), "rb") as opened:
        shared = mmap.mmap(opened.fileno(), SIZE, access=mmap.ACCESS_READ)
    published = np.frombuffer(shared, dtype=np.float64)
    return lambda: Counters(*published.tolist())


def _file(engine: int) -> Path:
    if (directory := os.environ.get(DIRECTORY)) is None:
        raise FileNotFoundError(f"{DIRECTORY} names no directory")
    # The name outlives the directory in the process that launched several API servers.
    return Path(directory, f"engine-{engine}")
