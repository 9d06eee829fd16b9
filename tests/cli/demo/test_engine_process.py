# SPDX-License-Identifier: Apache-2.0
"""The process of an engine, with a worker that has no engine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_redrafter.cli.demo.engine_process import EngineProcess, engine_environment
from vllm_redrafter.cli.demo.engine_worker import Decoded, EngineSettings, Round
from vllm_redrafter.utils.errors import ConfigError

SETTINGS = EngineSettings("t", None, "float32", 16, 2, 0, 0.9)
ROUND = Round([[1], [2]], 4, 2)

WORKER = """
import json, os, sys
from pathlib import Path
Path("pid").write_text(str(os.getpid()))
print("noise", file=sys.stderr)
sys.stdin.readline()
print("ready", flush=True)
for line in sys.stdin:
    prompts = json.loads(line)["prompts"]
    if prompts == [[0]]:
        sys.exit("out of memory")
    for _ in prompts:
        print("answer", flush=True)
    decoded = {"seconds": 1.5, "answers": [prompts], "stats": {}}
    print("decoded", json.dumps(decoded), flush=True)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineProcess:
    monkeypatch.chdir(tmp_path)
    return EngineProcess(SETTINGS, tmp_path / "log", (sys.executable, "-c", WORKER))


def state(pid: int) -> str:
    """As Linux has it: T for paused; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for(pid: int, states: str) -> None:
    deadline = time.monotonic() + 20
    while state(pid) not in (*states, *([""] if not states else [])):
        assert time.monotonic() < deadline, f"{pid} is {state(pid)}"
        time.sleep(0.01)


def test_an_engine_is_paused_when_it_has_nothing_to_do(process: EngineProcess) -> None:
    answers: list[int] = []
    with process:
        process.start()
        process.wait_until_ready()
        pid = int(Path("pid").read_text())
        wait_for(pid, "T")
        for _ in range(2):
            decoded = process.decode(ROUND, lambda: answers.append(1))
            assert decoded == Decoded(1.5, [[[1], [2]]], {})
            wait_for(pid, "T")
    assert len(answers) == 4
    assert state(pid) == ""
    assert Path("log").read_text() == "noise\n"


def test_a_failing_engine_shows_the_end_of_its_log(process: EngineProcess) -> None:
    with pytest.raises(ConfigError, match=r"(?s)vLLM failed.*log.*out of memory"), process:
        process.start()
        process.wait_until_ready()
        process.decode(Round([[0]], 4, 1), lambda: None)


def test_an_engine_that_does_not_start_says_so(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no such target')")
    with (
        pytest.raises(ConfigError, match="no such target"),
        EngineProcess(SETTINGS, tmp_path / "log", command) as process,
    ):
        process.start()
        process.wait_until_ready()


def test_an_interrupted_engine_ends(process: EngineProcess) -> None:
    with pytest.raises(KeyboardInterrupt), process:
        process.start()
        process.wait_until_ready()
        pid = int(Path("pid").read_text())
        raise KeyboardInterrupt
    assert state(pid) == ""


def test_a_paused_engine_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from vllm_redrafter.cli.demo.engine_process import EngineProcess
from vllm_redrafter.cli.demo.engine_worker import EngineSettings
settings = EngineSettings("t", None, "float32", 16, 2, 0, 0.9)
process = EngineProcess(settings, Path("log"), (sys.executable, "-c", {WORKER!r}))
process.start()
process.wait_until_ready()
print("started", flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        # A session with a leader that lives on, as a terminal's has.
        process_group=0,
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        pid = int((tmp_path / "pid").read_text())
        wait_for(pid, "T")
        os.kill(parent.pid, signal.SIGKILL)
    wait_for(pid, "")


def test_a_preload_of_the_users_own_is_kept() -> None:
    environment = engine_environment({"LD_PRELOAD": "/mine.so", "VLLM_LOGGING_LEVEL": "INFO"})
    assert environment["LD_PRELOAD"].split(":")[0] == "/mine.so"
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO"


def test_no_second_openmp_runtime_is_preloaded() -> None:
    environment = engine_environment({"LD_PRELOAD": "/torch/libgomp.so.1"})
    libraries = environment["LD_PRELOAD"].split(":")
    assert [path for path in libraries if "omp" in path] == ["/torch/libgomp.so.1"]
