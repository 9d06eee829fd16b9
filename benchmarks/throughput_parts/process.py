# SPDX-License-Identifier: Apache-2.0
"""The process of one engine, which can be paused, and the environment that all of them share."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from throughput_parts.engine import Case, Job, Run
from throughput_parts.process_group import ProcessGroup
from vllm_redrafter.engine.cpu.environment import cpu_variables
from vllm_redrafter.utils.files import tail

T = TypeVar("T")

ENGINE_SCRIPT = Path(__file__).with_name("engine.py")
LOG_LINES_SHOWN = 30
SECONDS_BETWEEN_LOOKS = 0.1


class EngineError(RuntimeError):
    """An engine's process failed."""


def environment(is_cpu: bool) -> dict[str, str]:
    """What is set for all engines alike, on top of the surroundings."""
    variables = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO")}
    return {**variables, **cpu_variables(os.environ)} if is_cpu else variables


class EngineProcess(ProcessGroup):
    """An engine that starts in a process group of its own, and measures there.

    Its log is added to `log`; without such a file it is kept only if the engine fails.
    """

    def __init__(self, job: Job, variables: dict[str, str], log: Path | None) -> None:
        self._config = job.engine["speculative_config"]
        self._folder = tempfile.TemporaryDirectory()
        job_file = Path(self._folder.name, "job.json")
        job_file.write_text(json.dumps(asdict(job)))
        self._results = Path(self._folder.name, "results.jsonl")
        self._read = 0
        self._keeps_log = log is not None
        temporary = partial(tempfile.NamedTemporaryFile, "w", suffix=".log", delete=False)
        with temporary() if log is None else log.open("a") as output:
            self._log = Path(output.name)
            super().__init__(
                [sys.executable, "-P", ENGINE_SCRIPT, job_file, self._results],
                {**os.environ, **variables},
                output,
            )

    def wait_until_started(self) -> None:
        """Return when it is ready to measure.

        Raises:
            EngineError: it failed; the message has the end of its log and says where all of it is.
        """
        self._wait_for(self._results.exists)

    def measure(self, case: Case) -> Run:
        """Return what it measured; it must have started, and not be paused."""
        with suppress(BrokenPipeError):  # it has ended, which `_wait_for` finds
            print(json.dumps(asdict(case)), file=self.input, flush=True)
        return Run.from_json(self._wait_for(self._next_result))

    def close(self) -> None:
        """End it, see `ProcessGroup.close`."""
        super().close()
        self._folder.cleanup()
        if not self._keeps_log:
            self._log.unlink()

    def _next_result(self) -> str:
        """The next line of its results; empty until there is all of it."""
        with self._results.open() as results:
            results.seek(self._read)
            line = results.readline()
            if not line.endswith("\n"):
                return ""
            self._read = results.tell()
            return line

    def _wait_for(self, look: Callable[[], T]) -> T:
        """What `look` finds, as soon as that is something."""
        while True:
            running = self.process.poll() is None
            # After that: it may have been the last thing that the process did.
            if found := look():
                return found
            if not running:
                raise self._failure()
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _failure(self) -> EngineError:
        self._keeps_log = True
        config = self._config
        return EngineError(
            f"{tail(self._log, LOG_LINES_SHOWN)}\n"
            f"The engine with {config=} failed; its log: {self._log}"
        )
