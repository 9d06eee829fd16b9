# SPDX-License-Identifier: Apache-2.0
"""A process with all processes that it starts: paused, resumed and ended as one."""

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
    """A process that leads a group of its own: signals reach all that it starts, Ctrl-C does not.

    It is to end where its standard input does, and so cannot outlive this process. As a context
    manager it ends with the block, at once where the block ends in an exception.

    Attributes:
        process, input: the leader, and its standard input.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        environment: Mapping[str, str],
        output: IO[str],
    ) -> None:
        self.process = subprocess.Popen(
            [*command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            process_group=0,
        )
        assert self.process.stdin is not None
        self.input = self.process.stdin

    def pause(self) -> None:
        """Stop the whole group until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the whole group, paused or not: by the end of its input, and then by force."""
        try:
            self.resume()  # paused processes would not notice
            with suppress(BrokenPipeError):
                self.input.close()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(SECONDS_TO_END)
        finally:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.process.terminate()  # while it works it does not read its input
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # there is none any more
            os.killpg(self.process.pid, number)
