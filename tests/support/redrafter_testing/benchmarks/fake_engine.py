# SPDX-License-Identifier: Apache-2.0
"""Stands in for throughput_parts/engine.py: no vLLM, but a second process, as vLLM has.

The job's `engine` says what to do: `folder` gets a file named after each of the two processes;
`dies` ("start", "measure") ends the first one there; one that `hangs` never answers, and
"stubbornly" does not heed SIGTERM either. A `Run`'s `spec_decode` counts the processes of other
engines in the folder, and says whether all of them are stopped.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have fake engines started, with their files in `folder`; returns where their names go."""
    monkeypatch.setattr("throughput_parts.process.ENGINE_SCRIPT", Path(__file__))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    names = folder / "processes"
    names.mkdir()
    return names


def main() -> None:
    engine = json.loads(Path(sys.argv[1]).read_text())["engine"]
    if engine.get("hangs") == "stubbornly":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = Path(engine["folder"])
    child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
    own = {os.getpid(), child.pid}
    for process in own:
        (folder / str(process)).touch()
    dies = engine.get("dies")
    if dies == "start":
        sys.exit("no such model")
    with Path(sys.argv[2]).open("w") as results:
        for line in sys.stdin:
            if dies == "measure":
                sys.exit("out of memory")
            while engine.get("hangs"):
                time.sleep(1)
            others = [other for other in processes(folder) if other.pid not in own]
            eventually(partial(all_stopped, others))
            run = {
                **json.loads(line),
                "generation": {"outputs": [[1]], "seconds": 1.0, "steps": 1, "request_steps": 1},
                "spec_decode": {"others": len(others), "all_stopped": all_stopped(others)},
                "parts": None,
            }
            print(json.dumps(run), file=results, flush=True)
    child.kill()


def processes(folder: Path) -> list[psutil.Process]:
    """Those of the folder's engines that are alive."""
    found = []
    for path in folder.iterdir():
        try:
            process = psutil.Process(int(path.name))
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def all_stopped(found: Sequence[psutil.Process]) -> bool:
    return all(process.status() == psutil.STATUS_STOPPED for process in found)


def all_gone(folder: Path) -> bool:
    """Is no process left of those that were started?"""
    assert len(list(folder.iterdir())) >= 2, "nothing was started"
    return eventually(lambda: not processes(folder))


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait for something: signals take effect a little later."""
    ends = time.monotonic() + 20
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return condition()


if __name__ == "__main__":
    main()
