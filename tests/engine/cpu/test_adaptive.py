# SPDX-License-Identifier: Apache-2.0
"""Whatever the batch's budget decides, the output is plain decoding's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forced_budget import (
    AlwaysDrafts,
    NeverDrafts,
    RandomPlanner,
    force,
    slope,
)
from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.oracles import oracle as oracles
from redrafter_testing.requests import workloads
from redrafter_testing.requests.answers import assert_logprobs_close, tokens_of
from vllm_redrafter.budget.planner import BatchPlanner

pytestmark = pytest.mark.engine

K = 15
GREEDY = workloads.greedy(count=64, max_tokens=128)
FEW = replace(GREEDY, prompts=GREEDY.prompts[:4], params=GREEDY.params[:4])
PLANNERS = [RandomPlanner, AlwaysDrafts, NeverDrafts, None]


@pytest.fixture(scope="module")
def oracle(target: Path, oracle_drafter: Path) -> Iterator[Engine]:
    """An engine that speculates well, with chunked prefill and a KV cache too small."""
    config = {
        "model": str(oracle_drafter),
        "num_speculative_tokens": K,
        "beam_width": oracles.WIDTH,
        "beam_length": oracles.LENGTH,
        "context_matches": 2,
    }
    with cpu_engine(
        target,
        setup=oracles.use,
        speculative_config=config,
        enable_prefix_caching=True,
        max_num_batched_tokens=288,
        num_gpu_blocks_override=64,
    ) as llm:
        yield llm


@pytest.fixture(params=PLANNERS, ids=lambda kind: kind.__name__ if kind else "its own")
def planner(request: pytest.FixtureRequest, oracle: Engine) -> Iterator[type[BatchPlanner] | None]:
    oracle.rpc(force, request.param)
    oracle.rpc("reset_redrafter_stats")
    yield request.param
    oracle.rpc(force, None)


def test_greedy_output_equals_plain(
    planner: type[BatchPlanner] | None, oracle: Engine, plain: dict[str, list[Any]]
) -> None:
    expected = [[tokens[:128] for tokens in answer] for answer in tokens_of(plain["greedy"])]
    assert tokens_of(oracle.run(GREEDY)) == expected
    stats = oracle.rpc("redrafter_stats")[0]
    if planner is NeverDrafts:
        assert stats["drafted_tokens"] == 0
    else:
        assert stats["sampled_tokens"] > stats["verifications"] > 0
    if planner in (NeverDrafts, RandomPlanner):
        assert stats["undrafted_steps"] > 0
    if planner in (RandomPlanner, AlwaysDrafts):
        assert stats["accepted_matched_tokens"] > 0, "paths were not used"


def test_chains_grammars_and_sampling_parameters_in_one_batch(
    planner: type[BatchPlanner] | None, oracle: Engine, plain: dict[str, list[Any]]
) -> None:
    answers = oracle.run(workloads.MIXED)
    assert tokens_of(answers) == tokens_of(plain["mixed"])
    for answer, wanted in zip(answers, plain["mixed"], strict=True):
        assert_logprobs_close(answer, wanted)


def limited_to(tokens: list[int]) -> workloads.Workload:
    """The few greedy requests, each with a max_nodes of its own."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=128,
            ignore_eos=True,
            extra_args={"redrafter": {"spec_tokens": max_nodes}},
        )
        for max_nodes in tokens
    ]
    return replace(FEW, params=params)


def test_no_request_has_more_nodes_verified_than_it_asks_for(
    oracle: Engine, plain: dict[str, list[Any]]
) -> None:
    oracle.rpc(force, AlwaysDrafts)
    expected = [[tokens[:128] for tokens in a] for a in tokens_of(plain["greedy"])[:4]]
    for limits in ([0, 0, 0, 0], [3, 3, 3, 3], [0, 1, 5, K]):
        oracle.rpc("reset_redrafter_stats")
        assert tokens_of(oracle.run(limited_to(limits))) == expected
        stats = oracle.rpc("redrafter_stats")[0]
        assert stats["drafted_tokens"] <= max(limits) * stats["verifications"]
        assert (stats["drafted_tokens"] > 0) == any(limits)
        assert any(limits) or stats["undrafted_steps"] > 100
    oracle.rpc(force, None)


def test_the_engine_learns_how_probable_its_nodes_are(oracle: Engine) -> None:
    oracle.rpc(force, AlwaysDrafts)
    oracle.run(GREEDY)
    # The oracle's log-probabilities are noise: the slope falls from 0.5 to 0, about which it varies
    # by what the last few requests' nodes say.
    assert abs(oracle.rpc(slope)[0]) < 0.25
    oracle.rpc(force, None)
