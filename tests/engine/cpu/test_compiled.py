# SPDX-License-Identifier: Apache-2.0
"""vLLM's default on a CPU compiles the target: output is plain decoding's."""

from pathlib import Path

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import compilation_mode
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine


def test_greedy_output_equals_plain_with_a_compiled_target(
    few_tokens_target: Path,
    few_tokens_fused_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
) -> None:
    config = {
        "model": str(few_tokens_fused_drafter),
        "num_speculative_tokens": 8,
        "adaptive": False,
    }
    with cpu_engine(
        few_tokens_target, enforce_eager=False, skip_tokenizer_init=True, speculative_config=config
    ) as llm:
        answers = single_tokens_of(llm.run(few_tokens.requests("greedy")))
        accepted = llm.counter("vllm:spec_decode_num_accepted_tokens")
        mode = llm.call(compilation_mode)
    assert mode != "NONE", "nothing was compiled"
    assert answers == few_tokens_plain["greedy"]
    assert accepted > 10, "trees were hardly used"
