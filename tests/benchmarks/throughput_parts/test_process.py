"""An engine's process: its runs are read back, its failure is shown."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from throughput_parts import process
from throughput_parts.engine import Job
from throughput_parts.process import EngineError, run_engine

from redrafter_testing.benchmarks.throughput_runs import PARTS, run

JOB = Job({"speculative_config": None}, [[1]], None, [1, 2], [0.0], 8, False, False)


def written(folder: Path, code: str) -> Path:
    path = folder / "engine.py"
    path.write_text(code)
    return path


def test_runs_are_read_back_and_counted_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run(1.0, [[1, 2]]), run(2.0, [[3]], parts=PARTS)]
    lines = "".join(json.dumps(asdict(made)) + "\n" for made in runs)
    script = written(tmp_path, f"import sys; open(sys.argv[2], 'w').write({lines!r})")
    monkeypatch.setattr(process, "ENGINE_SCRIPT", script)
    completed: list[None] = []

    assert run_engine(JOB, {}, lambda: completed.append(None)) == runs
    assert len(completed) == 2


def test_a_failed_engine_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = written(tmp_path, "import os; exit(os.environ['SET'])")
    monkeypatch.setattr(process, "ENGINE_SCRIPT", script)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with pytest.raises(
        EngineError, match=r"no such model\nThe engine .* failed; its log: "
    ) as failed:
        run_engine(JOB, {"SET": "no such model"}, lambda: None)
    assert Path(str(failed.value).split()[-1]).read_text() == "no such model\n"


def test_an_engine_does_not_see_the_parts_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else may look for modules of names like `plot` and `process`."""
    (tmp_path / "plot.py").touch()
    code = "import sys, importlib.util as util; exit(util.find_spec('plot') is not None)"
    monkeypatch.setattr(process, "ENGINE_SCRIPT", written(tmp_path, code))

    assert run_engine(JOB, {}, lambda: None) == []


def test_libraries_are_preloaded_for_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("LD_PRELOAD", "/mine.so")

    assert process.environment(is_cpu=False) == {"VLLM_LOGGING_LEVEL": "INFO"}
    variables = process.environment(is_cpu=True)
    assert variables.keys() == {"VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD"}
    assert variables["LD_PRELOAD"].split(":")[0] == "/mine.so"
