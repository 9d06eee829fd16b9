# SPDX-License-Identifier: Apache-2.0
"""Layers of the target, as files and the command line name them."""

from typing import Any

import pytest

from vllm_redrafter.heads.target_layers import checked_layers, layers_of
from vllm_redrafter.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_layers", "layers"),
    [
        ("none", 3, ()),
        ("2", 3, (2,)),
        ("1,2", 3, (1, 2)),
        ("auto", 32, (2, 16, 29)),
        ("auto", 7, (2, 3, 4)),
        ("auto", 3, (1, 2)),
        ("auto", 1, ()),
        ("none", None, ()),
    ],
)
def test_layers_of_a_target(text: str, num_layers: int | None, layers: tuple[int, ...]) -> None:
    assert layers_of(text, num_layers) == layers


@pytest.mark.parametrize(
    ("text", "num_layers", "message"),
    [
        ("3", 3, r"layers 3 are asked for, and the target has 3: .* 1 to 2 can be read"),
        ("1,9", 8, r"layers 1, 9 are asked for, and the target has 8"),
        ("0,2", 8, r"from 1 on, each once and in ascending order, got \[0, 2\]"),
        ("4,2", 8, r"ascending order, got \[4, 2\]"),
        ("2,2", 8, r"each once"),
        ("two", 8, r"must be numbers with commas between, auto or none, got 'two'"),
        ("", 8, r"must be numbers with commas between"),
        ("auto", None, r"auto is asked for, .* does not say how many layers it has: give none"),
        ("1", None, r"layers 1 are asked for, and the target does not say how many it has"),
    ],
)
def test_layers_that_a_target_lacks(text: str, num_layers: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^--target-layers.*" + message):
        layers_of(text, num_layers)


@pytest.mark.parametrize(
    ("layers", "message"),
    [(wrong, "a list of the target's layers") for wrong in (3, "2,3", [1.0], [True], None, {})]
    + [(list(range(1, 66)), "at most 64 layers .*, got 65$")],
)
def test_a_file_s_layers_are_a_list_of_integers(layers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^here must be {message}"):
        checked_layers(layers, "here")
