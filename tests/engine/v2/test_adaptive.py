"""The batch's budget of nodes, decided anew at every step: the answers stay plain decoding's.

Steps replay recordings in place of CUDA graphs, one graph for trees of any sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import budgets
from redrafter_testing.engines.forked_engine import Engine, reset_prefix_cache
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.requests import small_workloads, workloads
from redrafter_testing.requests.answers import assert_logprobs_close, tokens_of

pytestmark = pytest.mark.engine

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@pytest.fixture(scope="module")
def adaptive(small_target: Path, oracle_v2: Path) -> Iterator[Engine]:
    """Chunks of prompts beside trees, a KV cache that is too small, K by batch size."""
    with interpreted_engine(
        small_target,
        setup=budgets.use,
        environment={"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
        preloaded=False,
        enforce_eager=False,
        speculative_config={
            "model": str(oracle_v2),
            "num_speculative_tokens": 12,
            "num_speculative_tokens_per_batch_size": [[1, 4, 12], [5, 8, 7]],
        },
        reasoning_config=small_workloads.REASONING,
        max_num_batched_tokens=144,
        num_gpu_blocks_override=14,
    ) as llm:
        yield llm


def run(llm: Engine, load: workloads.Workload) -> tuple[list[Any], list[list[int]], float]:
    """Answers, nodes admitted by step and request, accepted tokens; from an empty cache."""
    llm.call(reset_prefix_cache)
    before = llm.counter(ACCEPTED)
    answers = llm.run(load)
    (admitted,) = llm.rpc(budgets.admitted)
    return answers, admitted, llm.counter(ACCEPTED) - before


def expected_greedy(plain_v2: dict[str, list[Any]]) -> list[list[list[int]]]:
    return [
        [tokens[: small_workloads.GREEDY_TOKENS] for tokens in answer]
        for answer in tokens_of(plain_v2["greedy"])
    ]


def test_greedy_output_equals_plain_whatever_each_step_s_budget(
    adaptive: Engine, plain_v2: dict[str, list[Any]]
) -> None:
    adaptive.rpc(recorded_graphs.replay, True)
    adaptive.rpc(budgets.force, 0.8)
    answers, admitted, accepted = run(adaptive, small_workloads.GREEDY)
    assert tokens_of(answers) == expected_greedy(plain_v2)
    assert accepted > 20, "trees were hardly used"
    several = [step for step in admitted if len(step) > 1]
    assert len({sum(step) for step in several}) > 5, "budgets hardly changed"
    assert sum(len(set(step)) > 1 for step in several) > 5, "lengths hardly differed"
    (replayed,) = adaptive.rpc(recorded_graphs.how_often_replayed)
    assert all(replayed.get(kind, 0) > 5 for kind in ("model", "piece", "draft")), replayed
