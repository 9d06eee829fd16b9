# SPDX-License-Identifier: Apache-2.0
"""A process with all processes that it starts: paused, resumed and ended as one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Self

SECONDS_TO_END = 30.0
"""What a process gets to end by itself, before its group is killed."""


class ProcessGroup:
    """A process that leads a group of its own: signals reach all that it starts.

    They do so when the leader has died as well. Ctrl-C in a terminal does not reach it. It is to
    end where its standard input does, and so cannot outlive this process: a paused group that is
    orphaned is ended by the system (POSIX has SIGHUP for it), any other by the end of its input.
    As a context manager it ends with the block, at once where the block ends in an exception.

    Args:
        command: what runs.
        environment: all of its environment.
        stdout: a file, or `subprocess.PIPE` to read from.
        stderr: a file.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        environment: Mapping[str, str],
        stdout: int | IO[str],
        stderr: int | IO[str],
    ) -> None:
        self._process = subprocess.Popen(
            [*command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            text=True,
            process_group=0,
        )
        assert self._process.stdin is not None
        self._input = self._process.stdin

    @property
    def running(self) -> bool:
        """Has the leader not ended?"""
        return self._process.poll() is None

    def tell(self, line: str) -> None:
        """Write a line to its standard input; whoever waits for the answer learns of its death."""
        with suppress(BrokenPipeError):
            self._input.write(f"{line}\n")
            self._input.flush()

    def next_line(self) -> str:
        """The next line of its standard output, which must be a pipe; empty at its end."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def pause(self) -> None:
        """Stop the whole group until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the group go on; nothing if it does."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the whole group, paused or not: by the end of its input, and then by force."""
        try:
            self.resume()  # paused processes would not notice
            with suppress(BrokenPipeError):
                self._input.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_END)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # While it works it does not read its input. If paused, it is told when resumed.
            self._process.terminate()
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # there is none any more
            os.killpg(self._process.pid, number)
