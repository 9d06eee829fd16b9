"""What answers in the chat, and how it is started: vLLM's server, or mlx-lm's with our trees."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_redrafter.cli.serving_backend import Backend
from vllm_redrafter.engine.cpu.environment import cpu_variables

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Without it a process started from a source folder would import what lies there."""


@dataclass(frozen=True)
class Service:
    """A server to start.

    Attributes:
        name: in messages.
        model: what the server calls the target.
        command: with its arguments, but for host and port, which come behind.
        environment: all of its variables.
        tells_tokens: does a stream have the tokens of each step?
    """

    name: str
    model: str
    command: Sequence[str]
    environment: dict[str, str]
    tells_tokens: bool

    @classmethod
    def of(
        cls, backend: Backend, target: str, drafter: str | None, arguments: Sequence[str]
    ) -> Service:
        """A target's.

        Args:
            backend: what serves.
            target: or a drafter that records it.
            drafter: None for none, or if `target` is one.
            arguments: more of the server's.
        """
        return (_mlx if backend == "mlx" else _vllm)(target, drafter, arguments)


def _vllm(target: str, drafter: str | None, arguments: Sequence[str]) -> Service:
    speculation = [] if drafter is None else ["--spec-model", drafter]
    served = ["--model", target, "--served-model-name", "target", *speculation]
    # One request at a time; whoever wants it otherwise says so behind this.
    served += ["--max-num-seqs", "1", *arguments]
    on_cpu = {} if torch.cuda.is_available() else cpu_variables(os.environ)
    level = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    return Service(
        "vLLM",
        "target",
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *served],
        {**os.environ, **on_cpu, "VLLM_LOGGING_LEVEL": level, **SAFE_PATH},
        tells_tokens=True,
    )


def _mlx(target: str, drafter: str | None, arguments: Sequence[str]) -> Service:
    speculation = [] if drafter is None else ["--drafter", drafter]
    served = ["mlx-serve", target, *speculation, "--", *arguments]
    return Service(
        "mlx-lm",
        "default_model",
        [sys.executable, "-m", "vllm_redrafter", *served],
        {**os.environ, **SAFE_PATH},
        tells_tokens=False,
    )
