"""An engine's process: it answers and pauses, its failure is shown, and nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from throughput_parts import process
from throughput_parts.engine import Case
from throughput_parts.process import EngineError, EngineProcess

from redrafter_testing.benchmarks import fake_engine
from redrafter_testing.benchmarks.fake_engine import all_gone, all_stopped, eventually, processes
from redrafter_testing.benchmarks.throughput_runs import fake_job
from vllm_redrafter.utils import process_group

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


def test_variables_and_surroundings_are_its_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "1")
    script(folder, "import os; exit(os.environ['SET'] + os.environ['GIVEN'])", monkeypatch)
    with (
        pytest.raises(EngineError, match=r"^21\n"),
        EngineProcess(fake_job(folder), {"SET": "2"}) as engine,
    ):
        engine.wait_until_started()


def test_one_that_dies_while_it_measures_fails(folder: Path) -> None:
    with (
        pytest.raises(EngineError, match="out of memory"),
        EngineProcess(fake_job(folder, dies="measure"), {}) as engine,
    ):
        started(engine).measure(CASE)
    assert all_gone(folder)


def test_one_that_died_while_it_was_paused_fails_at_its_turn(folder: Path) -> None:
    with (
        pytest.raises(EngineError, match="failed; its log"),
        EngineProcess(fake_job(folder), {}) as engine,
    ):
        started(engine).pause()
        for found in processes(folder):
            if found.cmdline()[0] == sys.executable:
                found.kill()
        assert eventually(lambda: len(processes(folder)) < 2)
        engine.resume()
        engine.measure(CASE)
    assert all_gone(folder)


def test_an_exception_ends_paused_and_busy_engines(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        EngineProcess(fake_job(folder), {}) as idle,
        EngineProcess(fake_job(folder, hangs="politely"), {}) as busy,
    ):
        started(idle).pause()
        started(busy)
        monkeypatch.setattr(process, "time", SimpleNamespace(sleep=interrupt))
        began = time.monotonic()
        busy.measure(CASE)
    assert time.monotonic() - began < process_group.SECONDS_TO_END, "it went on measuring"
    assert all_gone(folder)


def test_one_that_does_not_end_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "SECONDS_TO_END", 0.1)
    with (
        pytest.raises(KeyboardInterrupt),
        EngineProcess(fake_job(folder, hangs="stubbornly"), {}) as engine,
    ):
        started(engine).tell("{}")
        raise KeyboardInterrupt
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


def test_an_engine_does_not_see_the_parts_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else may look for modules of names like `plot` and `process`."""
    (tmp_path / "plot.py").touch()
    code = "import sys, importlib.util as util; util.find_spec('plot') or open(sys.argv[2], 'w')"
    script(tmp_path, code, monkeypatch)
    with EngineProcess(fake_job(tmp_path), {}) as engine:
        engine.wait_until_started()


def test_libraries_are_preloaded_for_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("LD_PRELOAD", "/mine.so")

    assert process.environment(is_cpu=False) == {"VLLM_LOGGING_LEVEL": "INFO"}
    variables = process.environment(is_cpu=True)
    set_on_cpu = {"VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD", "GLIBC_TUNABLES"}
    assert variables.keys() == {"VLLM_LOGGING_LEVEL", *set_on_cpu}
    assert variables["LD_PRELOAD"].split(":")[0] == "/mine.so"
