# SPDX-License-Identifier: Apache-2.0
"""Settings: a field of a dataclass is checked, and is an option of the command line."""

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from vllm_redrafter.cli.options import settings_as_options
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.settings import check, setting


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
        check(self)


def run(command: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(settings_as_options(command))
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, catch_exceptions=True)


def outer(config: Outer, name: str = "x") -> None:
    typer.echo(f"{name} {asdict(config)}")


def test_types_choices_flags_and_parts_become_options() -> None:
    assert run(outer).output == f"x {asdict(Outer())}\n"
    given = Outer("milk", 4, 0.2, True, Inner(1.0))
    options = ["--kind=milk", "--limit=4", "--rate=.2", "--is-hot", "--share=1", "--name=y"]
    assert run(outer, *options).output == f"y {asdict(given)}\n"
    for wrong in ("--kind=water", "--no-is-hot", "--limit=two"):
        assert run(outer, wrong).exit_code == 2
    shown = run(outer, "--help").output
    assert "[default: (no limit)]" in shown
    assert re.search(r"--rate +<float> +A rate\. \[default: 0\.1\]", shown)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 1}, "--limit must be at least 2, got 1"),
        ({"kind": "water"}, "--kind must be one of tea, milk, got 'water'"),
        ({"rate": 0.0}, "--rate must be a positive number, got 0.0"),
        ({"steps": 2}, "--steps must be above 2 and at most 4, got 2"),
        ({"portion": 2}, "--portion must be between 0 and 1, got 2"),
        ({"rate": math.inf}, "--rate must be a positive number, got inf"),
        ({"rate": math.nan}, "--rate must be a positive number, got nan"),
    ],
)
def test_values_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Outer(**settings)
    assert str(error.value) == message
