"""The process of one engine, which can be paused, and the environment that all of them share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from throughput_parts.engine import Case, Job, Run
from vllm_redrafter.engine.cpu.environment import cpu_variables
from vllm_redrafter.files import tail

T = TypeVar("T")

ENGINE_SCRIPT = Path(__file__).with_name("engine.py")
LOG_LINES_SHOWN = 30
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_END = 30.0
"""What an engine gets to end by itself, before it is killed."""


class EngineError(RuntimeError):
    """An engine's process failed."""


def environment(is_cpu: bool) -> dict[str, str]:
    """What is set for all engines alike, on top of the surroundings."""
    variables = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    return {**variables, **cpu_variables(os.environ)} if is_cpu else variables


class EngineProcess:
    """An engine that starts in a process of its own, and measures there.

    It is a process group, with all processes that vLLM starts: signals reach the whole of it, also
    when the first process has died. Ctrl-C in a terminal does not reach it. Should this process be
    killed, the system ends a paused group (it is orphaned then, for which POSIX has SIGHUP), and
    any other ends with its standard input.

    As a context manager it ends with the block, and does not finish measuring where that ends in
    an exception.

    Args:
        job: what to start, and to measure.
        variables: set in its environment, on top of the surroundings.
    """

    def __init__(self, job: Job, variables: dict[str, str]) -> None:
        self._config = job.engine["speculative_config"]
        self._folder = tempfile.TemporaryDirectory()
        job_file = Path(self._folder.name, "job.json")
        job_file.write_text(json.dumps(asdict(job)))
        self._results = Path(self._folder.name, "results.jsonl")
        self._read = 0
        self._failed = False
        with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            self._process = subprocess.Popen(
                [sys.executable, "-P", ENGINE_SCRIPT, job_file, self._results],
                bufsize=0,  # nothing is left to be written when its stdin is closed
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        assert self._process.stdin is not None
        self._input = self._process.stdin

    def wait_until_started(self) -> None:
        """Return when it is ready to measure.

        Raises:
            EngineError: it failed; the message has the end of its log and says where all of it is.
        """
        self._wait_for(self._results.exists)

    def measure(self, case: Case) -> Run:
        """Return what it measured; it must have started, and not be paused.

        Raises:
            EngineError: it has failed, now or before; see `wait_until_started`.
        """
        with suppress(BrokenPipeError):  # it is dead, which waiting finds out
            self._input.write(f"{json.dumps(asdict(case))}\n".encode())
        return Run.from_json(self._wait_for(self._next_line))

    def pause(self) -> None:
        """Stop all of its processes until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on; nothing if they do."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it with all of its processes, paused or not; its log is kept if it failed."""
        try:
            self.resume()  # paused processes would not notice
            self._input.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_END)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._folder.cleanup()
            if not self._failed:
                self._log.unlink()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # While it measures it does not read its input. If paused, it is told when resumed.
            self._process.terminate()
        self.close()

    def _next_line(self) -> str:
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
            running = self._process.poll() is None
            # After that: it may have been the last thing that the process did.
            if found := look():
                return found
            if not running:
                raise self._failure()
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _failure(self) -> EngineError:
        self._failed = True
        config = self._config
        return EngineError(
            f"{tail(self._log, LOG_LINES_SHOWN)}\n"
            f"The engine with {config=} failed; its log: {self._log}"
        )

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # there is none any more
            os.killpg(self._process.pid, number)
