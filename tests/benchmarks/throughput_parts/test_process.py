# SPDX-License-Identifier: Apache-2.0
"""An engine's process: it answers and pauses, its failure is shown, and nothing of it is left."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from throughput_parts import process
from throughput_parts.engine import Case
from throughput_parts.process import EngineError, EngineProcess

from redrafter_testing.benchmarks import fake_engine
from redrafter_testing.benchmarks.fake_engine import all_gone, all_stopped, eventually, processes
from redrafter_testing.benchmarks.throughput_runs import fake_job

CASE = Case(2, 0.7)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fake_engine.install(tmp_path, monkeypatch)


def started(engine: EngineProcess) -> EngineProcess:
    engine.wait_until_started()
    return engine


def paused(folder: Path) -> bool:
    """Are the two processes of one engine?"""
    found = processes(folder)
    return len(found) == 2 and all_stopped(found)


def script(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "engine.py"
    path.write_text(code)
    monkeypatch.setattr(process, "ENGINE_SCRIPT", path)


def test_it_measures_what_it_is_asked_for_and_leaves_nothing(folder: Path) -> None:
    with EngineProcess(fake_job(folder), {}) as engine:
        engine.wait_until_started()
        runs = [engine.measure(case) for case in (Case(1, 0.0), Case(8, 0.7))]

    assert [(run.concurrency, run.temperature) for run in runs] == [(1, 0.0), (8, 0.7)]
    assert all_gone(folder)
    assert list(folder.parent.iterdir()) == [folder], "files of a good engine are left"


def test_a_long_answer_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '{"concurrency": 1, "temperature": 0.0, "spec_decode": {}, "parts": null, '
    rest = '"generation": {"outputs": [], "seconds": 1, "steps": 1, "request_steps": 1}}'
    code = f"""
import sys, time
with open(sys.argv[2], "w") as results:
    sys.stdin.readline()
    for part in ({answer!r}, {rest!r}, "\\n"):
        print(part, end="", file=results, flush=True)
        time.sleep(0.2)
"""
    script(tmp_path, code, monkeypatch)
    with EngineProcess(fake_job(tmp_path), {}) as engine:
        assert started(engine).measure(CASE).generation.steps == 1


def test_a_paused_engine_stands_still_with_all_its_processes(folder: Path) -> None:
    with EngineProcess(fake_job(folder), {}) as engine:
        started(engine).pause()
        assert eventually(lambda: paused(folder))

        engine.resume()
        assert engine.measure(CASE).concurrency == CASE.concurrency
        assert psutil.STATUS_STOPPED not in {found.status() for found in processes(folder)}


def test_a_failed_start_shows_its_log(folder: Path) -> None:
    with (
        EngineProcess(fake_job(folder, dies="start"), {}) as engine,
        pytest.raises(
            EngineError, match=r"no such model\nThe engine .* failed; its log: "
        ) as failed,
    ):
        engine.wait_until_started()
    assert Path(str(failed.value).split()[-1]).read_text() == "no such model\n"
    assert all_gone(folder)


def test_one_that_dies_while_it_measures_fails(folder: Path) -> None:
    with (
        pytest.raises(EngineError, match="out of memory"),
        EngineProcess(fake_job(folder, dies="measure"), {}) as engine,
    ):
        started(engine).measure(CASE)
    assert all_gone(folder)


def test_paused_engines_do_not_outlive_a_killed_benchmark(folder: Path) -> None:
    """As when memory runs out: then nobody is left to resume and end them."""
    code = f"""
import sys, time
sys.path.append({str(Path(process.__file__).parents[1])!r})
from pathlib import Path
from throughput_parts import process
from throughput_parts.engine import Job
process.ENGINE_SCRIPT = Path({fake_engine.__file__!r})
engine = process.EngineProcess(Job(**{vars(fake_job(folder))!r}), {{}})
engine.wait_until_started()
engine.pause()
time.sleep(1000)
"""
    environment = {**os.environ, "TMPDIR": str(folder.parent)}  # its files are left
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as benchmark:
        was_paused = eventually(lambda: paused(folder))
        benchmark.kill()
    assert was_paused
    assert all_gone(folder)
