# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` for the soak alone: its start, the memory of all of its processes, its metrics."""

import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from vllm_redrafter.cli.chat.run import own_server

COMMAND = (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve")
MIB = 1 << 20


@contextmanager
def started(arguments: Sequence[str], log: Path) -> Iterator["Server"]:
    """One that answers, while the block runs; ConfigError where it ended instead."""
    with own_server([*COMMAND, *arguments], Console(quiet=True), log) as found:
        yield Server(*found)


@dataclass(frozen=True)
class Server:
    """Where it is, and its process."""

    address: str
    pid: int

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
