# SPDX-License-Identifier: Apache-2.0
"""Two ranks on a CPU (gloo), each with half of the target and of the draft head's vocabulary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import context_matching, inside_worker
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.models.families.experts import MIXTRAL
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine

TWO_RANKS: Mapping[str, Any] = {
    "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    "tensor_parallel_size": 2,
    "skip_tokenizer_init": True,
}


def test_greedy_output_on_two_ranks_equals_plain_on_one(
    few_tokens_target: Path,
    few_tokens_fused_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
) -> None:
    shape = {"num_speculative_tokens": 8, "context_matches": 2}
    config = {"model": str(few_tokens_fused_drafter), **shape}
    with interpreted_engine(few_tokens_target, speculative_config=config, **TWO_RANKS) as llm:
        untaught = llm.rpc(context_matching.probabilities)
        answers = single_tokens_of(llm.run(few_tokens.requests("greedy", count=4)))
        accepted = llm.counter("vllm:spec_decode_num_accepted_tokens")
        (head, trees), (other_head, other_trees) = llm.rpc(inside_worker.head_and_trees)
        learned = llm.rpc(context_matching.probabilities)
    assert answers == few_tokens_plain["greedy"][:4]
    assert accepted > 10, "trees were hardly used"
    assert head == other_head == few_tokens.VOCAB // 2
    assert trees == other_trees
    assert learned[0] == learned[1] != untaught[1], "of paths, ranks learn the same"
    assert max(map(max, trees)) >= few_tokens.VOCAB // 2, (
        "the second rank's tokens were never drafted"
    )


def test_greedy_output_of_two_ranks_with_half_of_the_experts_each_equals_plain_on_one(
    tmp_path: Path, few_tokens_drafter: Path
) -> None:
    target = MIXTRAL.make(tmp_path / "target")
    config = {"model": str(few_tokens_drafter), "num_speculative_tokens": 8}
    requests = few_tokens.requests("greedy", count=4)
    with interpreted_engine(target, skip_tokenizer_init=True) as plain:
        expected = single_tokens_of(plain.run(requests))
    with interpreted_engine(
        target, speculative_config=config, enable_expert_parallel=True, **TWO_RANKS
    ) as llm:
        assert llm.rpc(inside_worker.experts_of_rank) == [[0, 1, -1, -1], [-1, -1, 0, 1]]
        assert single_tokens_of(llm.run(requests)) == expected
        assert llm.counter("vllm:spec_decode_num_accepted_tokens") > 10, "trees were hardly used"
