# SPDX-License-Identifier: Apache-2.0
"""Command lines: a parser from a script's docstring, and types that say what they expect."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_redrafter import ConfigError, ReDrafterConfig


def script_parser(
    doc: str | None, output: str | None = "write all figures to this JSON file"
) -> argparse.ArgumentParser:
    """A parser whose help begins with the docstring's first line and ends with the rest of it.

    It has --output, with this help, for a results file; not if there is no help for it.
    """
    summary, details = (doc or "").split("\n", 1)
    made = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if output is not None:
        made.add_argument("--output", type=results_file, help=output)
    return made


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """The type of an integer from `low` to `high`, where there is an upper limit."""
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
            raise argparse.ArgumentTypeError(f"{text!r}: expected an integer {limits}")
        return int(text)

    return read


positive = integer(1)


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 0")
    return value


def tree_shape(text: str) -> ReDrafterConfig:
    """`WxL:K`: beam width, beam length, and the most tree nodes that are verified."""
    found = re.fullmatch(r"(\d+)x(\d+):(\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected WxL:K (beam width, beam length, tree nodes), as in 4x5:12"
        )
    width, length, nodes = map(int, found.groups())
    try:
        return ReDrafterConfig(nodes, width, length)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def shape_text(shape: ReDrafterConfig) -> str:
    """As `tree_shape` reads it."""
    return f"{shape.beam_width}x{shape.beam_length}:{shape.num_speculative_tokens}"


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value


def own_settings(text: str) -> dict[str, Any]:
    """A JSON object of ReDrafter's own keys of a speculative config."""
    value = json_object(text)
    own = {*ReDrafterConfig.own_keys()} - {"beam_width", "beam_length", "adaptive"}
    if unknown := [*value.keys() - own]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is none of {', '.join(sorted(own))}; shapes say the rest"
        )
    try:
        ReDrafterConfig(1, **value)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return value


def results_file(text: str) -> Path:
    """A file to write: an hour of measuring shall not end at a folder that does not exist."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or its folder does not exist")
    return path
