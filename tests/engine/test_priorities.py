# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduling by priority: who is put off for others answers as plain all the same."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import answers_by_priority
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("start", [cpu_engine, interpreted_engine], ids=["cpu", "v2"])
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
