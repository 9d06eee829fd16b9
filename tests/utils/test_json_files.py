# SPDX-License-Identifier: Apache-2.0
"""JSON that others wrote is read whole or refused."""

import os
from pathlib import Path

import pytest

from vllm_redrafter.utils.json_files import MOST_BYTES, parse_json, read_json


def test_what_is_in_the_file_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"ä": [1, 2.5, null]}', encoding="utf-8")
    assert read_json(path) == {"ä": [1, 2.5, None]}


def test_a_file_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("{}")
    os.truncate(path, 1 << 30)
    with pytest.raises(ValueError, match=r"1,073,741,824 bytes, and at most 16,777,216"):
        read_json(path)


def test_a_file_as_long_as_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("[1]" + " " * (MOST_BYTES - 3))
    assert read_json(path) == [1]


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_an_error_like_others(opening: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(opening * 200_000)


def test_other_text_is_refused_by_its_place() -> None:
    with pytest.raises(ValueError, match="column 5"):
        parse_json("[1, }")


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "9" * 5000])
def test_an_integer_that_is_no_float_any_more_is_an_error_like_others(number: str) -> None:
    with pytest.raises(ValueError, match=r"has \d+ digits: too large"):
        parse_json(f'{{"a": [{number}]}}')


def test_a_target_may_say_infinity_and_integers_of_more_than_64_bits() -> None:
    assert parse_json(f"[Infinity, {10**30}]") == [float("inf"), 10**30]
