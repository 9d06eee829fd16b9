# SPDX-License-Identifier: Apache-2.0
"""JSON that others wrote is read whole or refused."""

import os
from pathlib import Path

import pytest

from vllm_redrafter.utils.json_files import MOST_BYTES, parse_json, read_json


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    text = f'{{"ä": [1, 2.5, null, Infinity, {10**30}]}}'.encode()
    path.write_bytes(text + b" " * (MOST_BYTES - len(text)))
    assert read_json(path) == {"ä": [1, 2.5, None, float("inf"), 10**30]}
    os.truncate(path, 1 << 30)
    with pytest.raises(ValueError, match=r"1,073,741,824 bytes, and at most 16,777,216"):
        read_json(path)


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
