# SPDX-License-Identifier: Apache-2.0
"""What is said of configurations before any process starts."""

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

from redrafter_testing.engines.forked_engine import ForkServer
from redrafter_testing.engines.without_torchvision import let_vision_targets_load


def start_messages(
    server: ForkServer, environment: Mapping[str, str], targets: Sequence[Path], drafter: Path
) -> list[str]:
    """Why each target is refused, or why it verifies chains; "" where it verifies trees.

    In a process that has vLLM imported.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    variables = {**os.environ, **environment}
    names = [str(target) for target in targets]
    with patch.dict(os.environ, environment):
        process = server.start(_say, (theirs, variables, names, str(drafter)))
    theirs.close()
    try:
        messages: list[str] = ours.recv()
    finally:
        process.join(timeout=60)
        process.kill()
    return messages


def _say(
    connection: Connection, variables: dict[str, str], targets: list[str], drafter: str
) -> None:
    os.environ.update(variables)
    from vllm.engine.arg_utils import EngineArgs

    from vllm_redrafter import ConfigError, plugin
    from vllm_redrafter.engine.chains import ANNOUNCEMENT

    plugin.register()
    let_vision_targets_load()
    said: list[str] = []
    plugin._log_chains = lambda reasons: said.append(ANNOUNCEMENT % "; ".join(reasons))
    messages = []
    for target in targets:
        said.clear()
        arguments = EngineArgs(
            target,
            skip_tokenizer_init=True,
            enforce_eager=True,
            speculative_config={"model": drafter, "num_speculative_tokens": 8},
        )
        try:
            arguments.create_engine_config()
            messages.append("".join(said))
        except ConfigError as error:
            messages.append(str(error))
    connection.send(messages)
