# SPDX-License-Identifier: Apache-2.0
"""The process of an engine: all memory and threads are its own, and it can be paused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from vllm_redrafter.cli.demo import engine_worker
from vllm_redrafter.cli.demo.engine_worker import ANSWER, DECODED, Decoded, EngineSettings, Round
from vllm_redrafter.engine.cpu.environment import cpu_variables
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import tail
from vllm_redrafter.utils.process_group import ProcessGroup


class EngineProcess(ProcessGroup):
    """An engine in a process group of its own, which is paused whenever it has nothing to do.

    An engine that waits for requests takes processor time from one that decodes.

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
            super().__init__(
                [*command, json.dumps(asdict(settings))],
                engine_environment(os.environ),
                stdout=subprocess.PIPE,
                stderr=output,
            )

    def start(self) -> None:
        """Let the engine start."""
        self.tell("start")

    def wait_until_ready(self) -> None:
        """Return when the engine has started.

        Raises:
            ConfigError: it failed; the message has the end of its log.
        """
        self._answer()
        self.pause()

    def decode(self, asked: Round, on_answer: Callable[[], None]) -> Decoded:
        """Decode a round; the engine has started.

        Args:
            asked: the round.
            on_answer: called for each answer that is finished.

        Raises:
            ConfigError: see `wait_until_ready`.
        """
        self.resume()
        self.tell(json.dumps(asdict(asked)))
        while (line := self._answer()) == ANSWER:
            on_answer()
        self.pause()
        return Decoded(**json.loads(line.removeprefix(DECODED)))

    def _answer(self) -> str:
        if line := self.next_line():
            return line.rstrip("\n")
        raise ConfigError(f"vLLM failed; the end of {self._log}:\n{tail(self._log)}")


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
