"""The chat's own server: it starts, fails aloud, does not hear Ctrl-C, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from vllm_redrafter.chat.server import OwnServer
from vllm_redrafter.errors import ConfigError

SERVER = """
import http.server, subprocess, sys
worker = subprocess.Popen(["sleep", "1000"])
print("pids", worker.pid, flush=True)

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
from vllm_redrafter.chat.server import OwnServer

# A test's process may ignore it, and so would this one.
signal.signal(signal.SIGINT, signal.default_int_handler)

command = [sys.executable, "-c", sys.argv[2]]
with OwnServer([], Path(sys.argv[1]), os.environ, command) as server:
    server.wait_until_ready()
    try:
        print("ready", server._process.pid, flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted", server._process.poll(), flush=True)
        sys.stdin.readline()
"""


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
    with OwnServer([], log, os.environ, [sys.executable, "-c", SERVER]) as server:
        server.wait_until_ready()
        first = server._process.pid
        worker = int(log.read_text().split()[1])
        assert alive(first) and alive(worker)
    assert eventually(lambda: not (alive(first) or alive(worker)))


def test_one_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(ConfigError, match=r"vLLM did not start; the end of .*log:\nno such model"),
        OwnServer(["--model", "none"], tmp_path / "log", os.environ, command) as server,
    ):
        server.wait_until_ready()


def parent(tmp_path: Path) -> tuple[subprocess.Popen[str], int]:
    """A process with a server, as the chat is; and the server's number."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log"), SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline().split()[1])


def test_ctrl_c_reaches_the_chat_and_not_the_server(tmp_path: Path) -> None:
    process, server = parent(tmp_path)
    assert process.stdin is not None and process.stdout is not None
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "interrupted None\n"
    assert alive(server)
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(timeout=20) == 0
    assert eventually(lambda: not alive(server))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux alone")
def test_the_server_ends_when_the_chat_is_killed(tmp_path: Path) -> None:
    process, server = parent(tmp_path)
    process.kill()
    process.wait()
    assert eventually(lambda: not alive(server))
