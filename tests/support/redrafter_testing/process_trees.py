# SPDX-License-Identifier: Apache-2.0
"""Commands that start processes of their own, all of which end with the test; and what runs."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from redrafter_testing.python_path import SUPPORT


@contextmanager
def started(command: Sequence[object], **arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """A running command that is gone when the body ends, with all that it has started."""
    with subprocess.Popen([*map(str, command)], text=True, **arguments) as process:
        try:
            yield process
        finally:
            _kill_all(process)


def forking(env: Mapping[str, str]) -> dict[str, str]:
    """vLLM forks its processes, as on GPUs: each would import it for 8 seconds otherwise."""
    path = os.pathsep.join([str(SUPPORT / "forking"), env["PYTHONPATH"]])
    return {**env, "PYTHONPATH": path}


def run(
    command: Sequence[object], timeout: float, env: Mapping[str, str] = os.environ, **arguments: Any
) -> subprocess.CompletedProcess[str]:
    """What a command prints and how it ends; nothing of it is left, after a timeout either."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **arguments}
    with started(command, env=forking(env), **pipes) as process:
        stdout, stderr = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def output_of(command: Sequence[object], timeout: float = 600, **more: Any) -> str:
    """What a command prints that ends well."""
    done = run(command, timeout, **more)
    assert done.returncode == 0, done.stderr[-20_000:]
    return str(done.stdout)


def eventually(holds: Callable[[], bool]) -> bool:
    """Within 20 seconds."""
    deadline = time.monotonic() + 20
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def status(pid: int) -> str:
    """As psutil has it; of one that has ended, a zombie's."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)


def _kill_all(process: subprocess.Popen[str]) -> None:
    """Kill it and its descendants, which may be in sessions of their own, as torch's ranks are."""
    if process.poll() is not None:
        return  # it has ended by itself, and what it started is not known any more
    first = psutil.Process(process.pid)
    for each in (first, *first.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            each.kill()
