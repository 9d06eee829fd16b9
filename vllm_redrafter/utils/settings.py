# SPDX-License-Identifier: Apache-2.0
"""Settings: dataclass fields that bring along their help text and their limits.

    @dataclass(frozen=True)
    class Settings:
        epochs: int = setting(1, "Read the data this many times.", at_least=1)

        def __post_init__(self) -> None:
            check(self)

`check` knows a setting's limits, and the command line makes an option of it (`cli/options.py`).
Without torch, so that `--help` is quick.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from vllm_redrafter.utils.errors import ConfigError

T = TypeVar("T")
_KEY = "vllm_redrafter.setting"


@dataclass(frozen=True)
class _Setting:
    """What is known of a setting besides its name, type and default; limits may be None.

    `default_text` is what the default None stands for. `panel` is the title in `--help` of this
    option and those behind it.
    """

    help: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    default_text: str | None = None
    panel: str | None = None

    def allows(self, value: float) -> bool:
        """Is the value within the limits? NaN is not."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or self.above < value < math.inf)
            and (self.at_most is None or value <= self.at_most)
        )

    @property
    def limits(self) -> str:
        """In words: what a value must be."""
        if self.at_least is not None and self.at_most is not None:
            return f"between {self.at_least:g} and {self.at_most:g}"
        if self.above == 0 and self.at_most is None:
            return "a positive number"
        limits = {"at least": self.at_least, "above": self.above, "at most": self.at_most}
        return " and ".join(f"{word} {x:g}" for word, x in limits.items() if x is not None)


def setting(default: T, help: str, **more: Any) -> T:
    """A dataclass field that is a setting; its type may be a `Literal`, `X | None` or `bool`.

    `more` are fields of `_Setting`: limits, `default_text` and `panel`.
    """
    about = _Setting(help, **more)
    # As `dataclasses.field` itself: to a type checker, a field is a value of its type.
    return field(default=default, metadata={_KEY: about})


def settings_of(owner: type) -> dict[str, tuple[Any, _Setting]]:
    """By name, the type of each setting of a dataclass and what else is known of it."""
    hints = get_type_hints(owner)
    return {f.name: (hints[f.name], f.metadata[_KEY]) for f in fields(owner) if _KEY in f.metadata}


def option_of(name: str) -> str:
    """What a setting is called on the command line, and in messages."""
    return f"--{name.replace('_', '-')}"


def check(settings: Any) -> None:
    """Refuse settings that are beyond their limits."""
    for name, (kind, about) in settings_of(type(settings)).items():
        value = getattr(settings, name)
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            require(settings, name, value in choices, f"one of {', '.join(choices)}")
        elif not (value is None and type(None) in get_args(kind)):
            require(settings, name, about.limits == "" or about.allows(value), about.limits)


def require(settings: Any, name: str, fits: bool, limit: str) -> None:
    """Refuse a setting that does not fit, for what a field's limits cannot say."""
    if not fits:
        value = getattr(settings, name)
        raise ConfigError(f"{option_of(name)} must be {limit}, got {value!r}")
