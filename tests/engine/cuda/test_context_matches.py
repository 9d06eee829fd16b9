# SPDX-License-Identifier: Apache-2.0
"""Continuations found in the text, verified beside the drafter's and alone: output is plain's.

`test_parity.py` has them beside chains, grammars and logprobs.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import budgets, inside_worker
from redrafter_testing.engines.forked_engine import Engine, reset_prefix_cache
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine

SHAPE = {"beam_width": 3, "beam_length": 3, "context_matches": 2}
Plain = dict[str, list[list[int]]]

# Prompts are read in chunks, beside trees; not all requests fit into the KV cache to their end.
TIGHT = {"max_num_batched_tokens": 120, "num_gpu_blocks_override": 12}


def engine(target: Path, **speculative: Any) -> AbstractContextManager[Engine]:
    """Steps replay recordings in place of CUDA graphs."""
    return interpreted_engine(
        target,
        setup=recorded_graphs.use_as_a_gpu_with_long_contexts,
        enforce_eager=False,
        skip_tokenizer_init=True,
        speculative_config={"num_speculative_tokens": 8, **speculative},
        **TIGHT,
    )


def run(llm: Engine, sampling: str, count: int = 8) -> tuple[list[list[int]], dict[str, float]]:
    """Answers and what was counted; from an empty cache."""
    llm.call(reset_prefix_cache)
    llm.rpc("reset_redrafter_stats")
    answers = single_tokens_of(llm.run(few_tokens.requests(sampling, count)))
    (stats,) = llm.rpc("redrafter_stats")
    assert stats["accepted_matched_tokens"] > 5, "paths were hardly used"
    assert stats["matched_tokens"] > stats["accepted_matched_tokens"]
    return answers, stats


def test_output_equals_plain_whatever_each_step_s_budget_and_of_matches_alone(
    few_tokens_target: Path, few_tokens_drafter: Path, few_tokens_plain: Plain
) -> None:
    with engine(few_tokens_target, model=str(few_tokens_drafter), **SHAPE) as llm:
        llm.rpc(recorded_graphs.replay, True)
        for sampling, expected in few_tokens_plain.items():
            llm.rpc(budgets.force, 0.8)
            answers, _ = run(llm, sampling)
            assert answers == expected
            (levels,) = llm.rpc(budgets.lengths)
            assert set(levels) == {0, 1, 2, 3}
        (replayed,) = llm.rpc(recorded_graphs.how_often_replayed)
        assert replayed["draft"] > 10
        assert llm.counter("vllm:num_preemptions") > 0
        llm.rpc(budgets.force, 1.0, True, 0)
        (before,) = llm.rpc(inside_worker.match_probabilities)
        answers, stats = run(llm, "sampled", count=4)
        assert answers == few_tokens_plain["sampled"][:4]
        assert llm.rpc(budgets.lengths)[0].keys() == {0}
        assert stats["matched_tokens"] == stats["drafted_tokens"], "something was searched"
        (after,) = llm.rpc(inside_worker.match_probabilities)
        assert after[0] == before[0] and after[1] != before[1], "of greedy requests, of sampled"


def test_output_without_a_drafter_equals_plain(
    few_tokens_target: Path, few_tokens_plain: Plain
) -> None:
    with engine(few_tokens_target, method="redrafter") as llm:
        llm.rpc(inside_worker.reload_drafter)
        llm.rpc(budgets.force, 0.9)
        for sampling, expected in few_tokens_plain.items():
            answers, stats = run(llm, sampling)
            assert answers == expected
            assert stats["matched_tokens"] == stats["drafted_tokens"]
        (replayed,) = llm.rpc(recorded_graphs.how_often_replayed)
        assert replayed["draft"] > 10
