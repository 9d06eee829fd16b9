# SPDX-License-Identifier: Apache-2.0
"""What a single request may ask for."""

from typing import Any

import pytest

from vllm_redrafter.engine.request_options import check_request, requested_nodes
from vllm_redrafter.utils.errors import ConfigError

WRONG = [-1, 13, 1.5, "4", True, [4]]
OTHERS = [4, "4", {"tokens": 4}, {"spec_tokens": 4, "beam_width": 2}]


@pytest.mark.parametrize(
    ("extra_args", "nodes"),
    [
        (None, 12),
        ({"other": 3}, 12),
        ({"redrafter": {}}, 12),
        ({"redrafter": {"spec_tokens": 0}}, 0),
        ({"redrafter": {"spec_tokens": 5}}, 5),
        ({"redrafter.spec_tokens": 12}, 12),
    ],
)
def test_a_request_gets_what_it_asks_for(extra_args: dict[str, Any] | None, nodes: int) -> None:
    check_request(extra_args, 12)
    assert requested_nodes(extra_args, 12) == nodes
    assert requested_nodes(extra_args, 3) == min(nodes, 3)


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        *(({"redrafter": {"spec_tokens": n}}, "integer from 0 to 12 .* got ") for n in WRONG),
        ({"redrafter.spec_tokens": 13}, "integer from 0 to 12 .* got "),
        *(({"redrafter": options}, "'spec_tokens' alone") for options in OTHERS),
        ({"redrafter": {"spec_tokens": 4}, "redrafter.spec_tokens": 4}, "given twice"),
    ],
    ids=str,
)
def test_what_a_request_cannot_have_is_refused(extra_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_request(extra_args, 12)
