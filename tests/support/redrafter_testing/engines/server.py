# SPDX-License-Identifier: Apache-2.0
"""Running servers: `vllm serve`, drafting with the oracle, and others."""

import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from redrafter_testing import process_trees


def free_port() -> int:
    """Of this machine, a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def server(arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of `vllm serve` with a target and other arguments, while the body runs."""
    script = str(Path(__file__).with_name("serve_with_oracle.py"))
    with started([script, *arguments.split()], environment) as address:
        yield address


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **more: Any
) -> Iterator[str]:
    """The same of what Python runs with this command; `more` goes to `subprocess.Popen`."""
    port = free_port()
    place = ["--host", "127.0.0.1", "--port", port]
    variables = {**os.environ, **(environment or {})}
    address = f"http://127.0.0.1:{port}"
    python = [sys.executable, "-P", *command]
    with process_trees.started([*python, *place], env=variables, **more) as process:
        deadline = time.monotonic() + 240
        while not _answers(f"{address}/health"):
            assert process.poll() is None, "the server stopped while starting"
            assert time.monotonic() < deadline, "the server did not get ready"
            time.sleep(1)
        yield address
        process.terminate()
        process.wait(timeout=60)


def _answers(url: str) -> bool:
    with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def counter(address: str, name: str) -> float:
    """The value of one of the counters in /metrics."""
    with urllib.request.urlopen(f"{address}/metrics") as metrics:
        lines = metrics.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
