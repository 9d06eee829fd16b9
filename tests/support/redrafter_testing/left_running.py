# SPDX-License-Identifier: Apache-2.0
"""Processes that a run of the tests has started and not ended."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil

VARIABLE = "REDRAFTER_TEST_RUN"
"""The name of a run, which all of its processes inherit."""


def end_all(run: str, patience: float = 10.0) -> list[str]:
    """End what is left of a run after `patience` seconds; a line for each: its test and command."""
    deadline = time.monotonic() + patience
    while (left := list(_left(run))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process, _ in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return [line for _, line in left]


def _left(run: str) -> Iterator[tuple[psutil.Process, str]]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            variables, command = process.environ(), " ".join(process.cmdline())
            # multiprocessing's own helpers end when their parent does.
            helper = process.ppid() == os.getpid() and "from multiprocessing." in command
            if variables.get(VARIABLE) == run and process.pid != os.getpid() and not helper:
                yield process, f"{variables.get('PYTEST_CURRENT_TEST')}: {command}"
