# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` for the soak alone: all of its processes, their memory, and its metrics."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from vllm_redrafter.utils.files import tail

COMMAND = (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve")
SECONDS_TO_START = 240.0
SECONDS_TO_END = 30.0
SECONDS_BETWEEN_LOOKS = 0.2
MIB = 1 << 20

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent has ended."""


class ServerError(RuntimeError):
    """A server did not start."""


class Server:
    """Starts when it is made, and has to be closed."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.log = log
        self.address = f"http://127.0.0.1:{port}"
        place = ("--host", "127.0.0.1", "--port", str(port))
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments, *place],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
                preexec_fn=_end_with_parent,
            )

    def resident_mib(self) -> float:
        """Memory of all of its processes; what they share counts for each."""
        leader = psutil.Process(self.process.pid)
        found = 0.0
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                found += process.memory_info().rss / MIB
        return found

    def metrics(self) -> dict[str, float]:
        """Its counters and gauges, each summed over engines; labels are left out."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as response:
            text = response.read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_until_ready(self) -> None:
        """Until it answers.

        Raises:
            ServerError: it has ended, or takes too long.
        """
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(SECONDS_BETWEEN_LOOKS)
        raise ServerError(f"the server did not start; the end of {self.log}:\n{tail(self.log)}")

    def close(self) -> None:
        """End all of its processes."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_END)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS_TO_END)


def _end_with_parent() -> None:
    """Should this process be killed, its server is asked to end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
