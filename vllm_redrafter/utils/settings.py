# SPDX-License-Identifier: Apache-2.0
"""Settings: dataclass fields that bring along their help text and their limits.

    @dataclass(frozen=True)
    class Settings:
        epochs: int = setting(1, "Read the data this many times.", at_least=1)

        def __post_init__(self) -> None:
            check(self, "training:")

One line is all that a new setting needs: `check` knows its limits, and the command line makes an
option of it (`cli/options.py`). Without torch, so that `--help` is quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from vllm_redrafter.utils.errors import ConfigError

T = TypeVar("T")
_KEY = "vllm_redrafter.setting"


@dataclass(frozen=True)
class Setting:
    """What is known of a setting besides its name, type and default.

    Attributes:
        help: what it does, in a sentence or two.
        at_least: the smallest value; None for no such limit.
        above: all values are greater than this; None for no such limit.
        at_most: the largest value; None for no such limit.
        default_text: what the default None stands for.
    """

    help: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    default_text: str | None = None

    def allows(self, value: float) -> bool:
        """Is the value within the limits? NaN is not."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or self.above < value < math.inf)
            and (self.at_most is None or value <= self.at_most)
        )

    @property
    def limits(self) -> str:
        """The limits in words: what a value must be."""
        if self.at_least is not None and self.at_most is not None:
            return f"between {self.at_least:g} and {self.at_most:g}"
        if self.above == 0 and self.at_most is None:
            return "a positive number"
        limits = {"at least": self.at_least, "above": self.above, "at most": self.at_most}
        return " and ".join(f"{word} {x:g}" for word, x in limits.items() if x is not None)


def setting(
    default: T,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    default_text: str | None = None,
) -> T:
    """A dataclass field that is a setting; the parameters are those of `Setting`.

    The field's type says more: a `Literal` is a choice, `X | None` allows None, `bool` is a flag.
    """
    about = Setting(help, at_least, above, at_most, default_text)
    # As `dataclasses.field` itself: to a type checker, a field is a value of its type.
    return field(default=default, metadata={_KEY: about})


def settings_of(owner: type) -> dict[str, tuple[Any, Setting]]:
    """The fields of a dataclass that are settings: by name, the type and what else is known."""
    hints = get_type_hints(owner)
    return {f.name: (hints[f.name], f.metadata[_KEY]) for f in fields(owner) if _KEY in f.metadata}


def check(settings: Any, owner: str) -> None:
    """Check that each setting is within its limits, and each choice among what there is.

    Args:
        settings: an instance of a dataclass with settings.
        owner: how a message begins, such as `training:`.

    Raises:
        ConfigError: a value is not allowed; the message names it.
    """
    for name, (kind, about) in settings_of(type(settings)).items():
        value = getattr(settings, name)
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            require(settings, owner, name, value in choices, f"one of {', '.join(choices)}")
        elif not (value is None and type(None) in get_args(kind)):
            require(settings, owner, name, about.limits == "" or about.allows(value), about.limits)


def require(settings: Any, owner: str, name: str, fits: bool, limit: str) -> None:
    """Refuse a setting that does not fit, for what a field's limits cannot say.

    Args:
        settings: whose setting it is.
        owner: how the message begins, such as `training:`.
        name: of the setting.
        fits: whether all is well.
        limit: what the setting must be.

    Raises:
        ConfigError: it does not fit.
    """
    if not fits:
        value = getattr(settings, name)
        raise ConfigError(f"{owner} {name} must be {limit}, got {value!r}")
