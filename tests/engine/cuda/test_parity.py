# SPDX-License-Identifier: Apache-2.0
"""Output with speculation equals plain output, on Model Runner V2 under Triton's interpreter."""

from typing import Any

import pytest

from redrafter_testing.engines.forked_engine import Engine, run_with_aborts
from redrafter_testing.requests import small_workloads, workloads
from redrafter_testing.requests.answers import assert_logprobs_close, tokens_of

pytestmark = pytest.mark.engine


def accepted_per_draft(llm: Engine, before: tuple[float, float]) -> float:
    drafts, accepted = counters(llm)
    return (accepted - before[1]) / (drafts - before[0])


def counters(llm: Engine) -> tuple[float, float]:
    return (
        llm.counter("vllm:spec_decode_num_drafts"),
        llm.counter("vllm:spec_decode_num_accepted_tokens"),
    )


def test_greedy_output_equals_plain_with_chunks_prefix_caching_and_preemption(
    oracle: Engine, plain_v2: dict[str, list[Any]]
) -> None:
    before = counters(oracle)
    answers = oracle.run(small_workloads.GREEDY)
    expected = [
        [tokens[: small_workloads.GREEDY_TOKENS] for tokens in answer]
        for answer in tokens_of(plain_v2["greedy"])
    ]
    assert tokens_of(answers) == expected
    assert oracle.counter("vllm:num_preemptions") > 0
    assert oracle.counter("vllm:prefix_cache_hits") > 0
    assert accepted_per_draft(oracle, before) > 1, "trees were hardly used"


def test_sampled_output_equals_plain_token_for_token(
    oracle: Engine, plain_v2: dict[str, list[Any]]
) -> None:
    before = counters(oracle)
    assert tokens_of(oracle.run(small_workloads.SAMPLED)) == tokens_of(plain_v2["sampled"])
    assert accepted_per_draft(oracle, before) > 1, "trees were hardly used"


def test_all_sampling_parameters_in_one_batch(
    oracle: Engine, plain_v2: dict[str, list[Any]]
) -> None:
    answers = oracle.run(small_workloads.MIXED)
    for case, answer, expected in zip(workloads.CASES, answers, plain_v2["mixed"], strict=True):
        assert tokens_of([answer]) == tokens_of([expected]), case.name
        assert_logprobs_close(answer, expected)


def test_aborted_requests_leave_the_others_as_they_were(
    oracle: Engine, plain_v2: dict[str, list[Any]]
) -> None:
    aborted = [1, 4, 6]
    answers = oracle.call(run_with_aborts, small_workloads.GREEDY, aborted, 5)
    for index, expected in enumerate(tokens_of(plain_v2["greedy"])):
        if index not in aborted:
            assert tokens_of([answers[index]])[0] == [
                tokens[: small_workloads.GREEDY_TOKENS] for tokens in expected
            ]


def test_a_prompt_that_is_cached_but_for_one_token_is_no_draft(oracle: Engine) -> None:
    """vLLM pads its first step to a verification, of which there is nothing to verify."""
    (params,) = small_workloads.GREEDY.params[:1]
    load = workloads.Workload([list(range(40, 73))], [params])
    cached = oracle.counter("vllm:prefix_cache_hits")
    whole = tokens_of(oracle.run(load))
    assert oracle.counter("vllm:prefix_cache_hits") == cached
    oracle.rpc("reset_redrafter_stats")
    names = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"
    before = [oracle.counter(name) for name in names]
    assert tokens_of(oracle.run(load)) == whole
    assert oracle.counter("vllm:prefix_cache_hits") == cached + 32
    drafts, nodes = (oracle.counter(n) - b for n, b in zip(names, before, strict=True))
    (stats,) = oracle.rpc("redrafter_stats")
    # The last verification may be one that the scheduler did not wait for.
    assert 0 < drafts <= stats["verifications"] <= drafts + 1
    assert 0 < nodes <= stats["drafted_tokens"] <= nodes + 12


def test_statistics_agree_with_vllm_s_counters(oracle: Engine) -> None:
    few = workloads.Workload(small_workloads.GREEDY.prompts[:2], small_workloads.GREEDY.params[:2])
    oracle.rpc("reset_redrafter_stats")
    before, nodes = counters(oracle), -oracle.counter("vllm:spec_decode_num_draft_tokens")
    oracle.run(few)
    drafts, accepted = (b - a for a, b in zip(before, counters(oracle), strict=True))
    nodes += oracle.counter("vllm:spec_decode_num_draft_tokens")
    (stats,) = oracle.rpc("redrafter_stats")
    # The worker verifies once more for a request whose end is not yet known to the scheduler, and
    # a request's last verification may output more than is taken.
    assert drafts > 0 and drafts <= stats["verifications"] <= drafts + 2
    assert accepted <= stats["sampled_tokens"] - stats["verifications"] <= accepted + 4 * 5
    assert 0 < nodes <= stats["drafted_tokens"] <= nodes + 2 * 12
    assert all(stats[part] > 0 for part in ("forward", "draft", "accept", "compact"))
