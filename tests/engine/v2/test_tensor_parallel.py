"""Two ranks on a CPU (gloo), each with half of the target and of the draft head's vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine


def test_greedy_output_on_two_ranks_equals_plain_on_one(
    few_tokens_target: Path,
    few_tokens_fused_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
) -> None:
    config = {"model": str(few_tokens_fused_drafter), "num_speculative_tokens": 8}
    with interpreted_engine(
        few_tokens_target,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        tensor_parallel_size=2,
        skip_tokenizer_init=True,
        speculative_config=config,
    ) as llm:
        answers = single_tokens_of(llm.run(few_tokens.requests("greedy", count=4)))
        accepted = llm.counter("vllm:spec_decode_num_accepted_tokens")
        (head, trees), (other_head, other_trees) = llm.rpc(inside_worker.head_and_trees)
    assert answers == few_tokens_plain["greedy"][:4]
    assert accepted > 10, "trees were hardly used"
    assert head == other_head == few_tokens.VOCAB // 2
    assert trees == other_trees
    assert max(map(max, trees)) >= few_tokens.VOCAB // 2, (
        "the second rank's tokens were never drafted"
    )
