# SPDX-License-Identifier: Apache-2.0
"""Options of the command line: those made from settings (`utils/settings.py`), and models.

A model is looked up before a command imports what reads it, which takes seconds.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from vllm_redrafter.checkpoints.shipped import PREFIX, shipped_drafter
from vllm_redrafter.utils.hub import check_within_reach
from vllm_redrafter.utils.settings import option_of, settings_of


def looked_up(what: str) -> Callable[[typer.Context, str | None], str | None]:
    """A callback that refuses a model which is nowhere; `what` it is begins the message."""

    def callback(context: typer.Context, name: str | None) -> str | None:
        if name is not None and not context.resilient_parsing:
            if name.startswith(PREFIX):
                shipped_drafter(name.removeprefix(PREFIX))
            else:
                check_within_reach(name, what)
        return name

    return callback


TARGET, DRAFTER = looked_up("target"), looked_up("drafter")
TargetName = Annotated[
    str, typer.Argument(metavar="TARGET", help="A folder or a hub id.", callback=TARGET)
]
DrafterName = Annotated[
    str, typer.Argument(metavar="DRAFTER", help="A folder or a hub id.", callback=DRAFTER)
]
OtherDrafter = Annotated[
    str | None,
    typer.Option(
        callback=DRAFTER,
        help="A drafter, a folder or a hub id, to use instead of the one that comes with the "
        "package, which fits SmolLM2 alone.",
    ),
]


def existing(paths: Any) -> Any:
    """A callback that refuses a folder that is not there, or one of several."""
    for path in [paths] if isinstance(paths, Path) else paths or ():
        if not path.expanduser().exists():
            raise typer.BadParameter(f"path {str(path)!r} does not exist.")
    return paths


def settings_as_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take (nested) settings dataclasses; each setting is an option."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            parameters += _options(kind)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**values: Any) -> None:
        command(
            **{
                name: _build(kind, values) if is_dataclass(kind) else values[name]
                for name, kind in hints.items()
                if name != "return"
            }
        )

    # What typer reads.
    run.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _options(owner: Any) -> Iterator[Parameter]:
    settings, hints = settings_of(owner), get_type_hints(owner)
    panel = None
    for field in fields(owner):
        if field.name in settings:
            kind, about = settings[field.name]
            panel = about.panel or panel
            option = typer.Option(
                # Said, because typer would add --no-... to a flag.
                option_of(field.name),
                help=about.help,
                rich_help_panel=panel,
                show_default=about.default_text or field.default is not None,
            )
            yield Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[kind, option],
            )
        elif is_dataclass(hints[field.name]):
            yield from _options(hints[field.name])


def _build(owner: Any, values: Mapping[str, Any]) -> Any:
    settings, hints = settings_of(owner), get_type_hints(owner)
    given = {name: values[name] for name in settings}
    parts = {
        field.name: _build(hints[field.name], values)
        for field in fields(owner)
        if is_dataclass(hints[field.name])
    }
    return owner(**given, **parts)
