# SPDX-License-Identifier: Apache-2.0
"""Requests that want fewer nodes verified than the engine allows."""

from typing import Any

import pytest

from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.requests import small_workloads, workloads
from redrafter_testing.requests.answers import tokens_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "extra_args", [{"redrafter": {"spec_tokens": 2}}, {"redrafter.spec_tokens": 0}]
)
def test_a_request_s_trees_have_at_most_the_nodes_that_it_wants(
    oracle: Engine, plain_v2: dict[str, list[Any]], extra_args: dict[str, Any]
) -> None:
    params = [given.clone() for given in small_workloads.GREEDY.params[:3]]
    for given in params:
        given.extra_args = extra_args
    oracle.rpc("reset_redrafter_stats")
    answers = oracle.run(workloads.Workload(small_workloads.GREEDY.prompts[:3], params))
    expected = [
        [tokens[: small_workloads.GREEDY_TOKENS] for tokens in answer]
        for answer in tokens_of(plain_v2["greedy"][:3])
    ]
    assert tokens_of(answers) == expected
    (stats,) = oracle.rpc("redrafter_stats")
    if "redrafter" in extra_args:
        assert stats["verifications"] < stats["drafted_tokens"] <= 2 * stats["verifications"]
    else:
        assert stats["drafted_tokens"] == 0
        assert stats["undrafted_steps"] >= small_workloads.GREEDY_TOKENS - 1
