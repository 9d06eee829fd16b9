# SPDX-License-Identifier: Apache-2.0
"""Command lines: what is accepted, and what is said about the rest."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shared_parts.arguments import (
    integer,
    json_object,
    not_negative,
    positive,
    results_file,
    script_parser,
    shape_text,
    tree_shape,
)

from vllm_redrafter import ReDrafterConfig


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (positive, "7", 7),
        (integer(0), "0", 0),
        (integer(1, 128), "128", 128),
        (not_negative, "0.7", 0.7),
        (tree_shape, "4x5:12", ReDrafterConfig(12, 4, 5)),
        (json_object, '{"a": [1]}', {"a": [1]}),
        (results_file, "a.json", Path("a.json")),
    ],
)
def test_a_value_is_read(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (positive, "0", "'0': expected an integer of at least 1"),
        (positive, "-1", "expected an integer of at least 1"),
        (integer(1, 128), "129", "from 1 to 128"),
        (not_negative, "x", "'x': expected a number of at least 0"),
        (not_negative, "inf", "expected a number of at least 0"),
        (tree_shape, "4x5", r"'4x5': expected WxL:K .*, as in 4x5:12"),
        (tree_shape, "4x5:128", "'4x5:128': .* between 1 and 127"),
        (json_object, "[1]", "expected a JSON object"),
        (json_object, "{", "not JSON"),
        (results_file, ".", "is a folder"),
        (results_file, "missing/a.json", "its folder does not exist"),
    ],
)
def test_a_value_that_is_none_is_named(read: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        read(text)


def test_a_shape_is_written_as_it_is_read() -> None:
    assert shape_text(tree_shape("4x5:12")) == "4x5:12"


def test_help_begins_with_the_docstrings_first_line_and_ends_with_the_rest() -> None:
    shown = script_parser("What it is.\n\n    python it.py\n").format_help()
    assert "\n\nWhat it is.\n\noptions:" in shown
    assert shown.endswith("\n    python it.py\n")
