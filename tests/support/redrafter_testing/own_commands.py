# SPDX-License-Identifier: Apache-2.0
"""Our own commands, in this process."""

from typer.testing import CliRunner, Result

from vllm_redrafter.cli.main import app


def printed_by(*command: object, **variables: str) -> str:
    """What a command that ends well prints, with one space wherever there is white space."""
    done = _run(command, variables)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def refusal_of(*command: object, **variables: str) -> str:
    """What a command that ends with an error says of it."""
    done = _run(command, variables)
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.exception
    assert not done.stdout
    return done.stderr


def _run(command: tuple[object, ...], variables: dict[str, str]) -> Result:
    return CliRunner().invoke(app, [*map(str, command)], env=variables)
