# SPDX-License-Identifier: Apache-2.0
"""Two ranks on a CPU (gloo), each with half of the target and of the draft head's vocabulary."""

import shutil
from pathlib import Path

import pytest

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.models.checkpoints import edit_tensors
from redrafter_testing.requests import few_tokens

pytestmark = pytest.mark.engine


def test_greedy_output_on_two_ranks_equals_plain_on_one_and_drafters_are_replaced_on_both(
    few_tokens_target: Path,
    few_tokens_fused_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    shape = {"num_speculative_tokens": 8, "context_matches": 2}
    with interpreted_engine(
        few_tokens_target,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        tensor_parallel_size=2,
        speculative_config={"model": str(few_tokens_fused_drafter), **shape},
    ) as llm:
        untaught = llm.rpc(inside_worker.match_probabilities)
        assert llm.tokens(few_tokens.requests("greedy", 4)) == few_tokens_plain["greedy"][:4]
        assert llm.accepted() > 10, "trees were hardly used"
        (head, trees), (other_head, other_trees) = llm.rpc(inside_worker.head_and_trees)
        learned = llm.rpc(inside_worker.match_probabilities)
        other = shutil.copytree(few_tokens_fused_drafter, tmp_path / "other")
        edit_tensors(other, lambda tensors: tensors["lm_head.1.weight"].mul_(2))
        before = llm.rpc(inside_worker.last_weights)
        llm.rpc(inside_worker.let_first_rank_read, False)
        with pytest.raises(RuntimeError, match="the first rank cannot"):
            llm.rpc("redrafter_swap", str(other))
        assert llm.rpc(inside_worker.last_weights) == before
        llm.rpc(inside_worker.let_first_rank_read, True)
        assert llm.rpc("redrafter_swap", str(other)) == [{"drafter": str(other)}] * 2
        for swapped, old in zip(llm.rpc(inside_worker.last_weights), before, strict=True):
            assert swapped == [2 * weight for weight in old]
    assert head == other_head == few_tokens.VOCAB // 2
    assert trees == other_trees
    assert learned[0] == learned[1] != untaught[1], "of paths, ranks learn the same"
    assert max(map(max, trees)) >= few_tokens.VOCAB // 2, "of the second rank's tokens, none"
