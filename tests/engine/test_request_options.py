# SPDX-License-Identifier: Apache-2.0
"""What a single request may ask for."""

from typing import Any

import pytest

from vllm_redrafter.engine.request_options import check_request, requested_nodes
from vllm_redrafter.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("extra_args", "nodes"),
    [
        (None, 12),
        ({}, 12),
        ({"other": 3}, 12),
        ({"redrafter": {}}, 12),
        ({"redrafter": {"spec_tokens": 0}}, 0),
        ({"redrafter": {"spec_tokens": 5}}, 5),
        ({"redrafter.spec_tokens": 7}, 7),
        ({"redrafter.spec_tokens": 12}, 12),
    ],
)
def test_a_request_gets_what_it_asks_for(extra_args: dict[str, Any] | None, nodes: int) -> None:
    check_request(extra_args, 12)
    assert requested_nodes(extra_args, 12) == nodes


def test_a_step_may_give_less() -> None:
    assert requested_nodes({"redrafter.spec_tokens": 7}, 3) == 3


@pytest.mark.parametrize("max_nodes", [-1, 13, 1.5, "4", True, [4]])
def test_a_number_that_is_none_or_out_of_range_is_named_with_the_limit(max_nodes: object) -> None:
    for extra_args in (
        {"redrafter": {"spec_tokens": max_nodes}},
        {"redrafter.spec_tokens": max_nodes},
    ):
        with pytest.raises(ConfigError, match=r"integer from 0 to 12 .* got "):
            check_request(extra_args, 12)


@pytest.mark.parametrize("options", [4, "4", {"tokens": 4}, {"spec_tokens": 4, "beam_width": 2}])
def test_other_options_are_refused(options: object) -> None:
    with pytest.raises(ConfigError, match="'spec_tokens' alone"):
        check_request({"redrafter": options}, 12)


def test_both_ways_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        check_request({"redrafter": {"spec_tokens": 4}, "redrafter.spec_tokens": 4}, 12)
