# SPDX-License-Identifier: Apache-2.0
"""A process and what it starts, paused and ended as one; the processes here are tiny."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_redrafter.utils import process_group
from vllm_redrafter.utils.process_group import ProcessGroup

PARENT = """
import os, subprocess, sys
nothing = subprocess.DEVNULL  # or the pipe would stay open as long as the child lives
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=nothing, stdout=nothing)
print(os.getpid(), child.pid, flush=True)
for line in sys.stdin:
    print(f"heard {line}", end="", flush=True)
    if line == "die\\n":
        os.kill(os.getpid(), 9)
"""
CHILD = "import time; time.sleep(100)"


def group() -> ProcessGroup:
    command = [sys.executable, "-c", PARENT, CHILD]
    return ProcessGroup(command, os.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def state(pid: int) -> str:
    """As Linux has it: T for paused; empty where there is no such process, or but its remains."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return found.replace("Z", "")


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def pids(process: ProcessGroup) -> list[int]:
    return [int(word) for word in process.next_line().split()]


def test_all_of_it_is_paused_and_goes_on() -> None:
    with group() as process:
        both = pids(process)
        process.pause()
        assert eventually(lambda: [state(pid) for pid in both] == ["T", "T"])
        process.resume()
        process.tell("you")
        assert process.next_line() == "heard you\n"
    assert eventually(lambda: not any(map(state, both)))


def test_all_of_it_ends_with_the_block_paused_or_not() -> None:
    with group() as process:
        both = pids(process)
        process.pause()
    assert eventually(lambda: not any(map(state, both)))


def test_what_a_dead_leader_leaves_is_ended() -> None:
    with group() as process:
        leader, child = pids(process)
        process.tell("die")
        assert process.next_line() == "heard die\n"
        assert eventually(lambda: not process.running) and state(leader) == ""
        assert state(child) != ""
        process.tell("anybody there?")
        assert process.next_line() == ""
    assert eventually(lambda: state(child) == "")


def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "SECONDS_TO_END", 0.1)
    code = "import time; print('ready', flush=True); time.sleep(100)"
    command = [sys.executable, "-c", code]
    with ProcessGroup(command, os.environ, subprocess.PIPE, subprocess.DEVNULL) as process:
        assert process.next_line() == "ready\n"
    assert not process.running


def test_an_exception_does_not_wait_for_the_end_of_its_work() -> None:
    code = "import time; print('ready', flush=True); time.sleep(100)"
    command = [sys.executable, "-c", code]
    began = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        ProcessGroup(command, os.environ, subprocess.PIPE, subprocess.DEVNULL) as process,
    ):
        assert process.next_line() == "ready\n"
        raise KeyboardInterrupt
    assert time.monotonic() - began < process_group.SECONDS_TO_END
