# SPDX-License-Identifier: Apache-2.0
"""Output with speculation equals output without it, through real vLLM."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.oracles import oracle as oracles
from redrafter_testing.oracles.oracle import allowed_depth
from redrafter_testing.requests import workloads
from redrafter_testing.requests.answers import assert_logprobs_close, tokens_of

pytestmark = pytest.mark.engine

GREEDY = workloads.greedy(count=64, max_tokens=128)
# 16 trees of 16 nodes, and 32 tokens of a prompt: prompts are read in chunks. 64 blocks of 32
# tokens do not hold 16 requests to their end: some are preempted.
TIGHT = {"max_num_batched_tokens": 288, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def oracle(target: Path, oracle_drafter: Path) -> Iterator[Engine]:
    """An engine that speculates well, with chunked prefill forced and a KV cache too small."""
    config = {"model": str(oracle_drafter), "num_speculative_tokens": 15, "adaptive": False}
    # What the oracle draws is counted, and would share its trees with what the text repeats.
    config |= {"context_matches": 0}
    with cpu_engine(
        target,
        setup=oracles.use,
        speculative_config=config,
        enable_prefix_caching=True,
        **TIGHT,
    ) as llm:
        yield llm


def test_greedy_output_equals_plain_with_chunks_prefix_caching_and_preemption(
    oracle: Engine, plain: dict[str, list[Any]]
) -> None:
    preempted = oracle.counter("vllm:num_preemptions")
    cached = oracle.counter("vllm:prefix_cache_hits")
    answers = oracle.run(GREEDY)
    expected = [[tokens[:128] for tokens in answer] for answer in tokens_of(plain["greedy"])]
    assert tokens_of(answers) == expected
    assert oracle.counter("vllm:num_preemptions") > preempted
    assert oracle.counter("vllm:prefix_cache_hits") > cached


@pytest.mark.parametrize("name", workloads.SAMPLED)
def test_sampling_parameters_act_as_without_speculation(
    name: str, oracle: Engine, plain: dict[str, list[Any]]
) -> None:
    oracle.rpc("reset_redrafter_stats")
    answers = oracle.run(workloads.SAMPLED[name])
    expected = plain[name]
    assert tokens_of(answers) == tokens_of(expected)
    assert [[o.text for o in a.outputs] for a in answers] == [
        [o.text for o in a.outputs] for a in expected
    ]
    for answer, wanted in zip(answers, expected, strict=True):
        assert_logprobs_close(answer, wanted)
    stats = oracle.rpc("redrafter_stats")[0]
    assert stats["sampled_tokens"] > 1.2 * stats["verifications"], "little was accepted"


def test_an_oracle_reaches_the_tokens_per_step_that_its_trees_allow(oracle: Engine) -> None:
    few = workloads.Workload(GREEDY.prompts[:3], GREEDY.params[:3])
    oracle.run(few)  # prompts are cached now: no request waits for the budget
    oracle.rpc("reset_redrafter_stats")
    oracle.run(few)
    steps, sampled = 0, 0
    for prompt in few.prompts:
        position, end = len(prompt), len(prompt) + 128
        while position + 1 < end:
            accepted = 1 + allowed_depth(position)
            steps, sampled, position = steps + 1, sampled + accepted, position + accepted
    stats = oracle.rpc("redrafter_stats")[0]
    assert (stats["verifications"], stats["sampled_tokens"]) == (steps, sampled)


def test_max_model_len_reached_in_the_middle_of_a_tree(
    oracle: Engine, plain: dict[str, list[Any]]
) -> None:
    # A prompt that leaves 20 tokens of max_model_len=512, then max_tokens far above.
    answer = plain["greedy"][0]
    known = list(answer.prompt_token_ids) + list(answer.outputs[0].token_ids)
    padding = [7] * (512 - 20 - len(known))
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    load = workloads.Workload([padding + known], [params])
    first = tokens_of(oracle.run(load))
    assert len(first[0][0]) == 20
    assert first == tokens_of(oracle.run(load))


def test_a_finished_request_in_a_batch_leaves_the_others_as_they_were(
    oracle: Engine, plain: dict[str, list[Any]]
) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=1 + 5 * (i % 7), ignore_eos=True)
        for i in range(24)
    ]
    load = workloads.Workload(GREEDY.prompts[:24], params)
    expected = [
        [tokens[: p.max_tokens] for tokens in answer]
        for p, answer in zip(params, tokens_of(plain["greedy"])[:24], strict=True)
    ]
    assert tokens_of(oracle.run(load)) == expected


@pytest.mark.parametrize("name", ["greedy", "repetition-penalty", "temperature", "json"])
def test_a_prompt_that_is_cached_but_for_one_token(name: str, oracle: Engine) -> None:
    """vLLM's scheduler would pad its first step to a verification, of rows for nothing."""
    case = next((c for c in workloads.CASES if c.name == name), workloads.Case(name, {}))
    settings = {"temperature": 0, "max_tokens": 40, **case.params}
    params = SamplingParams(**settings, seed=5)
    # One block of 32 tokens and one token more; another text for each case.
    first = 20 + 40 * ["greedy", "repetition-penalty", "temperature", "json"].index(name)
    load = workloads.Workload([list(range(first, first + 33))], [params])
    cached = oracle.counter("vllm:prefix_cache_hits")
    whole = tokens_of(oracle.run(load))
    assert oracle.counter("vllm:prefix_cache_hits") == cached
    before = [oracle.counter(f"vllm:spec_decode_num_{name}") for name in ("drafts", "draft_tokens")]
    oracle.rpc("reset_redrafter_stats")
    assert tokens_of(oracle.run(load)) == whole
    assert oracle.counter("vllm:prefix_cache_hits") == cached + 32
    after = [oracle.counter(f"vllm:spec_decode_num_{name}") for name in ("drafts", "draft_tokens")]
    (stats,) = oracle.rpc("redrafter_stats")
    assert stats["verifications"] > 0
    counted = [now - then for now, then in zip(after, before, strict=True)]
    assert counted == [stats["verifications"], stats["drafted_tokens"]]
