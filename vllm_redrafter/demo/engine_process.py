"""The process of an engine: all memory and threads are its own, and it can be paused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from vllm_redrafter.demo import engine_worker
from vllm_redrafter.demo.engine_worker import ANSWER, DECODED, Decoded, EngineSettings, Round
from vllm_redrafter.engine.cpu.environment import cpu_variables
from vllm_redrafter.errors import ConfigError
from vllm_redrafter.files import tail

SECONDS_TO_END = 20.0
"""What an engine gets to end by itself, before it is killed."""


class EngineProcess:
    """An engine in a process of its own, which is paused whenever it has nothing to do.

    An engine that waits for requests takes processor time from one that decodes. It is a process
    group, with all processes that vLLM starts: signals reach the whole of it. Ctrl-C in a terminal
    does not. As a context manager it ends with the block; and, should this process be killed, with
    it: a paused group that is orphaned is ended by the system, any other by the end of its input.

    Args:
        settings: the engine.
        log: takes what it prints.
        command: what runs there, before the settings; see `engine_worker.py`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        log: Path,
        command: tuple[str, ...] = (sys.executable, "-m", engine_worker.__name__),
    ) -> None:
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(settings))],
                env=engine_environment(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                process_group=0,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def start(self) -> None:
        """Start the engine, and return when it is ready.

        Raises:
            ConfigError: it failed; the message has the end of its log.
        """
        self._tell("start")
        self._next_line()
        self._signal(signal.SIGSTOP)

    def decode(self, asked: Round, on_answer: Callable[[], None]) -> Decoded:
        """Decode a round; the engine has started.

        Args:
            asked: the round.
            on_answer: called for each answer that is finished.

        Raises:
            ConfigError: see `start`.
        """
        self._signal(signal.SIGCONT)
        self._tell(json.dumps(asdict(asked)))
        while (line := self._next_line()) == ANSWER:
            on_answer()
        self._signal(signal.SIGSTOP)
        return Decoded(**json.loads(line.removeprefix(DECODED)))

    def close(self) -> None:
        """End all of its processes, paused or not."""
        try:
            self._signal(signal.SIGCONT)
            with suppress(BrokenPipeError):
                self._input.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_END)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._output.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # While it decodes it does not read its input.
            self._process.terminate()
        self.close()

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it is dead, which reading finds out
            self._input.write(f"{line}\n")
            self._input.flush()

    def _next_line(self) -> str:
        if line := self._output.readline():
            return line.rstrip("\n")
        raise ConfigError(f"vLLM failed; the end of {self._log}:\n{tail(self._log)}")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # there is none any more
            os.killpg(self._process.pid, number)


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with what a CPU engine is fast with; quiet and offline."""
    return {
        **environment,
        **cpu_variables(environment),
        # Without it a process started from a source folder would import what lies there.
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": environment.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
    }
