# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM schedules otherwise: by priority, and sessions whose input comes in pieces."""

from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import answers_by_priority, answers_in_sessions
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of
from redrafter_testing.requests.workloads import Workload

pytestmark = pytest.mark.engine

ENGINES = pytest.mark.parametrize("start", [cpu_engine, interpreted_engine], ids=["cpu", "v2"])
PIECES, TOKENS = 4, 11


@ENGINES
def test_answers_in_sessions_equal_plain_while_requests_beside_are_drafted_for(
    start: Any, few_tokens_target: Path
) -> None:
    greedy, sampled = (few_tokens.requests(sampling, count=2) for sampling in few_tokens.SAMPLING)
    sessions = Workload([*greedy.prompts, *sampled.prompts], [*greedy.params, *sampled.params])
    beside = few_tokens.requests("greedy", count=4)
    for params in (*sessions.params, *beside.params):
        params.output_kind = RequestOutputKind.DELTA
    for params in sessions.params:
        params.max_tokens = TOKENS
    arguments = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 8}
    with start(few_tokens_target, **arguments) as llm:
        plain = llm.call(answers_in_sessions, sessions, PIECES, beside)
    speculative = {"method": "redrafter", "num_speculative_tokens": 8, "adaptive": False}
    with start(few_tokens_target, speculative_config=speculative, **arguments) as llm:
        assert llm.call(answers_in_sessions, sessions, PIECES, beside) == plain
        assert llm.counter("vllm:spec_decode_num_accepted_tokens") > 0
    assert [len(answer) for answer in plain[0]] == [PIECES * TOKENS] * 4


@ENGINES
def test_answers_by_priority_equal_plain(
    start: Any,
    few_tokens_target: Path,
    few_tokens_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
) -> None:
    with start(
        few_tokens_target,
        skip_tokenizer_init=True,
        scheduling_policy="priority",
        max_model_len=256,
        max_num_seqs=8,
        num_gpu_blocks_override=12,
        speculative_config={"model": str(few_tokens_drafter), "num_speculative_tokens": 8},
    ) as llm:
        answers = llm.call(answers_by_priority, few_tokens.requests("greedy"))
        assert single_tokens_of(answers) == few_tokens_plain["greedy"]
        assert llm.counter("vllm:num_preemptions") > 0
        assert llm.counter("vllm:spec_decode_num_accepted_tokens") > 0
