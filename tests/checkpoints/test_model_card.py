# SPDX-License-Identifier: Apache-2.0
"""A model card of a record that another program wrote."""

from typing import Any

import pytest

from redrafter_testing.models.checkpoints import PROJECTED
from vllm_redrafter.checkpoints.model_card import model_card

RECORD = {"settings": {"epochs": 3}, "result": {"tokens_per_step": 2.5}, "speculation": {"k": 4}}


@pytest.mark.parametrize("value", ["text", 5, None, [1], {"tokens_per_step": "many"}])
@pytest.mark.parametrize("part", [*RECORD, "selector", "sources"])
def test_parts_that_are_no_tables_are_left_out(part: str, value: Any) -> None:
    known, other = (model_card(PROJECTED, "t", r) for r in (RECORD, RECORD | {part: value}))
    assert ("2.50 tokens per target step" in other) == (part != "result")
    for line in set(other.splitlines()) - set(known.splitlines()):
        assert line.startswith(("Not measured", "2.50 tokens per", "| `tokens_per_step` | many |"))
