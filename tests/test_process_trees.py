"""What a test starts ends with it, with all that it has started itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from redrafter_testing import process_trees

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
open(sys.argv[2], "w").write(str(child.pid))
child.wait()
"""
STUCK = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"


def ended(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(10)
    return not psutil.pid_exists(pid)


def test_a_child_that_is_stuck_ends_with_a_test_that_fails(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with (
        pytest.raises(subprocess.TimeoutExpired),
        process_trees.started([sys.executable, "-c", PARENT, STUCK, pid]) as process,
    ):
        while not (pid.exists() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        process.communicate(timeout=0.1)
    assert process.returncode == -signal.SIGKILL and ended(int(pid.read_text()))


def test_what_a_command_prints_and_how_it_ends_is_told() -> None:
    code = "import sys; print('out'); sys.exit('err')"
    done = process_trees.run([sys.executable, "-c", code], timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "out\n", "err\n")
