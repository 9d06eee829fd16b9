# SPDX-License-Identifier: Apache-2.0
"""Settings: a field of a dataclass is checked, and is an option of the command line."""

import math
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from vllm_redrafter.cli.options import settings_as_options
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.settings import check, setting


@dataclass(frozen=True)
class MoreTraining(TrainingConfig):
    """The one edit that a new training setting needs."""

    patience: int = setting(3, "Stop after this many estimates without a gain.", at_least=1)


@dataclass(frozen=True)
class Inner:
    share: float = setting(0.5, "A share.", above=0, at_most=1)


@dataclass(frozen=True)
class Outer:
    kind: Literal["tea", "milk"] = setting("tea", "A choice.")
    limit: int | None = setting(None, "A limit.", at_least=2, default_text="no limit")
    rate: float = setting(0.1, "A rate.", above=0)
    is_hot: bool = setting(False, "A flag.")
    inner: Inner = field(default_factory=Inner)
    steps: float = setting(3.0, "Steps.", above=2, at_most=4)
    portion: float = setting(0.0, "A portion.", at_least=0, at_most=1)

    def __post_init__(self) -> None:
        check(self, "cups:")


def run(command: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(settings_as_options(command))
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, catch_exceptions=True)


def more_training(config: MoreTraining) -> None:
    typer.echo(f"{config.patience} {config.epochs}")


def outer(config: Outer, name: str = "x") -> None:
    typer.echo(f"{name} {asdict(config)}")


def test_a_new_field_is_an_option_with_default_help_and_limits() -> None:
    assert MoreTraining().patience == 3
    help_line = next(
        line for line in run(more_training, "--help").output.splitlines() if "--patience" in line
    )
    assert "<int>" in help_line
    assert "Stop after this many estimates without a gain. [default: 3]" in help_line
    assert run(more_training).output == "3 1\n"
    assert run(more_training, "--patience", "5", "--epochs=2").output == "5 2\n"
    message = "training: patience must be at least 1, got 0"
    with pytest.raises(ConfigError, match=message):
        MoreTraining(patience=0)
    refused = run(more_training, "--patience=0")
    assert isinstance(refused.exception, ConfigError) and str(refused.exception) == message


def test_types_choices_flags_and_parts_become_options() -> None:
    assert run(outer).output == f"x {asdict(Outer())}\n"
    given = Outer("milk", 4, 0.2, True, Inner(1.0))
    options = ["--kind=milk", "--limit=4", "--rate=.2", "--is-hot", "--share=1", "--name=y"]
    assert run(outer, *options).output == f"y {asdict(given)}\n"
    for wrong in ("--kind=water", "--no-is-hot", "--limit=two"):
        assert run(outer, wrong).exit_code == 2
    assert "[default: (no limit)]" in run(outer, "--help").output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "water"}, "cups: kind must be one of tea, milk, got 'water'"),
        ({"limit": 1}, "cups: limit must be at least 2, got 1"),
        ({"rate": 0.0}, "cups: rate must be a positive number, got 0.0"),
        ({"steps": 2}, "cups: steps must be above 2 and at most 4, got 2"),
        ({"portion": 2}, "cups: portion must be between 0 and 1, got 2"),
        ({"rate": math.inf}, "cups: rate must be a positive number, got inf"),
        ({"rate": math.nan}, "cups: rate must be a positive number, got nan"),
    ],
)
def test_values_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Outer(**settings)
    assert str(error.value) == message


@pytest.mark.parametrize("library", ["torch", "transformers", "datasets", "vllm", "numpy"])
def test_the_command_line_is_imported_without(library: str) -> None:
    program = f"import sys, vllm_redrafter.cli.main; sys.exit({library!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
