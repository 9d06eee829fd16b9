# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` for the soak alone: its start, the memory of all of its processes, its metrics."""

import os
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from throughput_parts.process import environment
from throughput_parts.process_group import ProcessGroup

from vllm_redrafter import ConfigError
from vllm_redrafter.utils.files import tail

COMMAND = (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve")
MIB = 1 << 20


@contextmanager
def started(arguments: Sequence[str], log: Path) -> Iterator["Server"]:
    """One that answers, while the block runs; ConfigError where it ended instead."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*COMMAND, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    variables = os.environ | environment(is_cpu=not torch.cuda.is_available())
    with log.open("w") as output, ProcessGroup(command, variables, output) as group:
        server = Server(f"http://127.0.0.1:{port}", group.process.pid)
        while not server.is_healthy():
            if group.process.poll() is not None:
                raise ConfigError(f"the server ended; the end of {log}:\n{tail(log)}")
            time.sleep(0.25)
        yield server
        group.process.terminate()


@dataclass(frozen=True)
class Server:
    """Where it is, and its process."""

    address: str
    pid: int

    def is_healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=5):
            return True
        return False

    def resident_mib(self) -> float:
        """Memory of all of its processes; what they share counts for each."""
        leader = psutil.Process(self.pid)
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
