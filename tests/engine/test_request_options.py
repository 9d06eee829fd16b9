# SPDX-License-Identifier: Apache-2.0
"""What a single request may ask for."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_redrafter.engine.request_options import (
    SALT_KEY,
    check_request,
    partition_of,
    requested_nodes,
)
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
        *(({"redrafter": options}, "'spec_tokens' and 'share' alone") for options in OTHERS),
        *(({"redrafter.share": value}, "true or false, got") for value in ("false", 2, 0.0, [])),
        ({SALT_KEY: "other's"}, "there is no 'redrafter.salt'"),
        ({"redrafter": {"share": False}, "redrafter.share": True}, "given twice"),
        ({"redrafter": {"spec_tokens": 4}, "redrafter.spec_tokens": 4}, "given twice"),
    ],
    ids=str,
)
def test_what_a_request_cannot_have_is_refused(extra_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_request(extra_args, 12)


def test_answers_are_shared_among_requests_of_one_salt_and_adapter_that_do_not_refuse() -> None:
    def adapter(name: str, path: str) -> Any:
        return SimpleNamespace(lora_name=name, lora_path=path)

    shared = [{"redrafter": {"share": True}}, {"redrafter.share": 1}, {"redrafter.spec_tokens": 3}]
    for extra_args in (None, *shared):
        check_request(extra_args, 12)
        assert partition_of(extra_args, None) == partition_of({}, None) is not None
    for extra_args in ({"redrafter": {"share": False}}, {"redrafter.share": 0, SALT_KEY: "a"}):
        assert partition_of(extra_args, None) is None
    apart = [({}, None), ({SALT_KEY: "a"}, None), ({SALT_KEY: "b"}, None)]
    apart += [({}, adapter(*of)) for of in (("a", "1"), ("a", "2"), ("b", "1"))]
    assert len({partition_of(*given) for given in apart}) == len(apart)
