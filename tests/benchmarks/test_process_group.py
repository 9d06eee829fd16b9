# SPDX-License-Identifier: Apache-2.0
"""A process and what it starts, paused and ended as one; the processes here are tiny."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from throughput_parts import process_group
from throughput_parts.process_group import ProcessGroup

from redrafter_testing.process_trees import eventually, status

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(os.getpid(), child.pid, flush=True)
for line in sys.stdin:
    if line == "die\\n":
        os.kill(os.getpid(), 9)
    print("heard", line, flush=True)
"""
DEAF = "import time; print('ready', flush=True); time.sleep(100)"


def start(code: str, output: Path) -> ProcessGroup:
    with output.open("w") as file:
        process = ProcessGroup([sys.executable, "-c", code], os.environ, file)
    assert eventually(lambda: output.read_text().endswith("\n"))
    return process


def states(output: Path) -> set[str]:
    """Of the two processes; without those that have ended."""
    pids = map(int, output.read_text().splitlines()[0].split())
    return {*map(status, pids)} - {psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("goes_on", [True, False])
def test_all_of_it_is_paused_and_ends_with_the_block(goes_on: bool, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with start(PARENT, output) as process:
        process.pause()
        assert eventually(lambda: states(output) == {psutil.STATUS_STOPPED})
        if goes_on:
            process.resume()
            print("you", file=process.input, flush=True)
            assert eventually(lambda: "heard you" in output.read_text())
    assert eventually(lambda: not states(output))


def test_an_exception_does_not_wait_for_the_end_of_its_work(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), start(DEAF, tmp_path / "output"):
        began = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - began < process_group.SECONDS_TO_END
