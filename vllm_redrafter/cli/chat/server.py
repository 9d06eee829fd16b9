"""A server for this process alone."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from vllm_redrafter.cli.chat.service import Service
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import tail

SECONDS_TO_END = 30.0
SECONDS_BETWEEN_LOOKS = 0.25
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent has ended."""


class OwnServer:
    """Starts with the block and ends with it, or with this process, however that ends.

    It is a session of its own: Ctrl-C in the terminal, which shall stop an answer, does not reach
    it.

    Args:
        service: what is started.
        log: takes what it prints.
    """

    def __init__(self, service: Service, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._name, self._log = service.name, log
        self.address = f"http://127.0.0.1:{port}"
        place = ["--host", "127.0.0.1", "--port", str(port)]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*service.command, *place],
                env=service.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def wait_until_ready(self) -> None:
        """Return when it answers.

        Raises:
            ConfigError: it ended instead; the message has the end of its log.
        """
        while True:
            if self._process.poll() is not None:
                raise ConfigError(
                    f"{self._name} did not start; the end of {self._log}:\n{tail(self._log)}"
                )
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_END)
        finally:
            # Its workers are of the same group; what is still there has been asked to go.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
