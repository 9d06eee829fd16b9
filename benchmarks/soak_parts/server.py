"""A `vllm serve` for the soak alone: all of its processes, their memory, and its metrics."""

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from vllm_redrafter.utils.files import tail

COMMAND = (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve")
SECONDS_TO_START = 240.0
SECONDS_TO_END = 30.0
SECONDS_BETWEEN_LOOKS = 0.2
PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20
TITLES = {"EngineCore": "engine core", "Worker": "worker"}
"""A part of a process's title, and what the process is."""

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent has ended."""


class ServerError(RuntimeError):
    """A server did not start."""


class Server:
    """Starts when it is made, is ready in the block, and gone after it with all of its processes.

    Args:
        arguments: vLLM's, but for host and port.
        log: takes what it prints.
        environment: all of its variables.
    """

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

    def __enter__(self) -> Server:
        try:
            self.wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def processes(self) -> dict[int, str]:
        """Its processes that are alive: name by id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError, ValueError):
                    state, name = _status(entry)
                    group = os.getpgid(int(entry.name))
                    if group == self.process.pid and state != "Z":
                        found[int(entry.name)] = name
        return found

    def resident_mib(self) -> dict[str, float]:
        """Memory of its processes, by what they are; what they share counts for each."""
        total: dict[str, float] = {}
        for process, name in self.processes().items():
            kind = next((kind for title, kind in TITLES.items() if title in name), "front end")
            with suppress(OSError):
                pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
                total[kind] = total.get(kind, 0.0) + pages * PAGE / MIB
        return total

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

    def _end(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_END)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS_TO_END)


def _end_with_parent() -> None:
    """Should this process be killed, its server is asked to end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _status(entry: Path) -> tuple[str, str]:
    """A process's state, and its command line, which vLLM replaces with a title."""
    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
    command = (entry / "cmdline").read_bytes().decode(errors="replace")
    return state, " ".join(command.split("\0")[:2]).strip()
