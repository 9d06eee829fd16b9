"""Starting the process of one engine, and the environment that all of them share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from throughput_parts.engine import Job, Run
from vllm_redrafter.demo.decoding import tail
from vllm_redrafter.engine.cpu.environment import cpu_variables

ENGINE_SCRIPT = Path(__file__).with_name("engine.py")
LOG_LINES_SHOWN = 30


class EngineError(RuntimeError):
    """An engine's process failed."""


def environment(is_cpu: bool) -> dict[str, str]:
    """What is set for all engines alike, on top of the surroundings."""
    variables = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    return {**variables, **cpu_variables(os.environ)} if is_cpu else variables


def run_engine(job: Job, variables: dict[str, str], advance: Callable[[], None]) -> list[Run]:
    """Run a job in a process of its own; `advance` is called for each run that it completes.

    Raises:
        EngineError: it failed; the message has the end of its log and says where all of it is.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job_file, results = folder / "job.json", folder / "results.jsonl"
        job_file.write_text(json.dumps(asdict(job)))
        results.touch()
        with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
            process = subprocess.Popen(
                [sys.executable, "-P", ENGINE_SCRIPT, job_file, results],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )
        seen = 0
        try:
            while True:
                running = process.poll() is None
                # A line being written has no newline yet.
                complete = results.read_text().count("\n")
                for _ in range(complete - seen):
                    advance()
                seen = complete
                if not running:
                    break
                time.sleep(0.5)
        finally:
            process.terminate()
            process.wait()
        log_file = Path(log.name)
        if process.returncode:
            config = job.engine["speculative_config"]
            raise EngineError(
                f"{tail(log_file, LOG_LINES_SHOWN)}\n"
                f"The engine with {config=} failed; its log: {log_file}"
            )
        log_file.unlink()
        return [Run.from_json(line) for line in results.read_text().splitlines()]
