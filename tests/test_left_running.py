"""What a run of the tests leaves is found, named and ended."""

from __future__ import annotations

import os
import subprocess
import sys

from redrafter_testing import left_running

PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid)
"""


def orphan_of(run: str) -> int:
    """A process whose parent has ended."""
    variables = {**os.environ, left_running.VARIABLE: run}
    return int(subprocess.check_output([sys.executable, "-c", PARENT], env=variables))


def test_an_orphan_is_named_and_ended_and_one_of_another_run_is_not() -> None:
    orphan_of("this"), orphan_of("another")
    (line,) = left_running.end_all("this", patience=0.0)
    assert "test_an_orphan_is_named" in line and line.endswith(": sleep 100")
    assert left_running.end_all("this", patience=10.0) == []
    assert len(left_running.end_all("another", patience=0.0)) == 1
