# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets act along draft tokens, as vLLM applies them: their requests get chains."""

from typing import Any

import pytest

from redrafter_testing.engines.forked_engine import Engine, reasoning_markers
from redrafter_testing.requests import small_workloads
from redrafter_testing.requests.answers import tokens_of
from redrafter_testing.requests.small_workloads import REASONING_END, REASONING_START

pytestmark = pytest.mark.engine

BOUNDED = range(5)  # the first requests of the workload


def test_budgets_end_thinking_where_they_do_without_speculation(
    oracle: Engine, plain_v2: dict[str, list[Any]]
) -> None:
    assert oracle.call(reasoning_markers) == (REASONING_START, REASONING_END)
    before = oracle.counter("vllm:spec_decode_num_accepted_tokens")
    answers = tokens_of(oracle.run(small_workloads.thinking()))
    assert answers == tokens_of(plain_v2["thinking"])
    assert oracle.counter("vllm:spec_decode_num_accepted_tokens") - before > 40
    # 4 thoughts of a budget of 6 were in the prompt.
    for request, thoughts in enumerate((0, 6, 2, 5)):
        ended = answers[request][0][thoughts:][: len(REASONING_END)]
        assert ended == REASONING_END, f"request {request}"
    assert answers[4][0].count(REASONING_END[-1]) == 2, "thinking did not start in the output"

    unbounded = tokens_of(oracle.run(small_workloads.thinking(bounded=False)))
    for request, (bounded, free) in enumerate(zip(answers, unbounded, strict=True)):
        assert (bounded != free) == (request in BOUNDED)
