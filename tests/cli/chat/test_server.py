"""The chat's own server: it starts, fails aloud, does not hear Ctrl-C, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from redrafter_testing import process_trees
from vllm_redrafter.cli.chat.server import OwnServer
from vllm_redrafter.cli.chat.service import Service
from vllm_redrafter.utils.errors import ConfigError

SERVER = """
import http.server, os, subprocess, sys
worker = subprocess.Popen(sys.argv[1].split(), stdin=subprocess.PIPE)
print("pids", os.getpid(), worker.pid, flush=True)

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""

PARENT = """
import os, signal, sys, time
from pathlib import Path
from vllm_redrafter.cli.chat.server import OwnServer
from vllm_redrafter.cli.chat.service import Service

# A test's process may ignore it, and so would this one.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The worker ends with its server by itself, as vLLM's do.
command = [sys.executable, "-c", sys.argv[2], "cat"]
service = Service("vLLM", "target", command, dict(os.environ), tells_tokens=True)
with OwnServer(service, Path(sys.argv[1])) as server:
    server.wait_until_ready()
    try:
        print(Path(sys.argv[1]).read_text().splitlines()[0], flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.readline()
"""


def running(script: str, *arguments: str) -> Service:
    command = [sys.executable, "-c", script, *arguments]
    return Service("vLLM", "target", command, dict(os.environ), tells_tokens=True)


def eventually(condition: Callable[[], bool]) -> bool:
    ends = time.monotonic() + 20
    while not condition() and time.monotonic() < ends:
        time.sleep(0.02)
    return condition()


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_it_ends_with_the_block_and_with_its_workers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with OwnServer(running(SERVER, "sleep 1000"), log) as server:
        server.wait_until_ready()
        first, worker = map(int, log.read_text().split()[1:3])
        assert alive(first) and alive(worker)
    assert eventually(lambda: not (alive(first) or alive(worker)))


def test_one_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    service = running("import sys; sys.exit('no such model')")
    with (
        pytest.raises(ConfigError, match=r"vLLM did not start; the end of .*log:\nno such model"),
        OwnServer(service, tmp_path / "log") as server,
    ):
        server.wait_until_ready()


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a server, as the chat is; it says the numbers of the server and its worker."""
    command = [sys.executable, "-c", PARENT, tmp_path / "log", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with process_trees.started(command, **pipes, process_group=0) as process:
        yield process


def server_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline().split()[1])


def test_ctrl_c_reaches_the_chat_and_not_the_server(parent: subprocess.Popen[str]) -> None:
    process, server = parent, server_of(parent)
    assert process.stdin is not None and process.stdout is not None
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    assert alive(server)
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(timeout=20) == 0
    assert eventually(lambda: not alive(server))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux alone")
def test_the_server_ends_when_the_chat_is_killed(parent: subprocess.Popen[str]) -> None:
    server = server_of(parent)
    parent.kill()
    parent.wait()
    assert eventually(lambda: not alive(server))
