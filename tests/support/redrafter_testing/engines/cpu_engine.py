# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU engine, as it is chosen where there is no GPU."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from redrafter_testing.engines import forked_engine
from redrafter_testing.engines.forked_engine import Engine, ForkServer, Setup, setups_in

ENVIRONMENT = {**forked_engine.ENVIRONMENT, "TORCH_COMPILE_DISABLE": "0"}  # for enforce_eager=False

SETTINGS = {"max_num_seqs": 16, "block_size": 32}

SERVER = ForkServer(ENVIRONMENT)


def cpu_engine(
    target: Path, setup: Setup = None, **arguments: Any
) -> AbstractContextManager[Engine]:
    """An engine in float32, with `arguments` of vllm.LLM besides, or instead of, SETTINGS."""
    return forked_engine.forked_engine(
        target, SERVER, ENVIRONMENT, setups_in(setup), None, {**SETTINGS, **arguments}
    )


def measure_briefly() -> None:
    """For `setup`, where the budget may decide what it likes: costs are measured in no time."""
    from vllm_redrafter.engine.cpu.v1 import costs

    costs.MAX_SECONDS = costs.WARM_UP_SECONDS = 0.2
