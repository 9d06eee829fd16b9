# SPDX-License-Identifier: Apache-2.0
"""Requests that end inside a tree: what was accepted beyond their end is not output."""

from typing import Any

import pytest
from vllm import SamplingParams

from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.requests import small_workloads, workloads
from redrafter_testing.requests.answers import tokens_of
from redrafter_testing.requests.small_workloads import MAX_MODEL_LEN

pytestmark = pytest.mark.engine


def tokens_cut_off(llm: Engine, load: workloads.Workload) -> tuple[list[Any], int]:
    """The answers, and at least how many tokens more were accepted than are output."""
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    before = [llm.counter(name) for name in names]
    answers = llm.run(load)
    drafts, accepted = (llm.counter(n) - b for n, b in zip(names, before, strict=True))
    output = sum(len(tokens) for answer in tokens_of(answers) for tokens in answer)
    # Each request's first token, and any in a step without a draft, is not counted.
    return answers, int(drafts + accepted + len(answers) - output)


def test_max_model_len_and_min_tokens_inside_a_tree(
    oracle: Engine, plain_v2: dict[str, list[Any]]
) -> None:
    load, expected = small_workloads.ends(), plain_v2["ends"]
    answers = oracle.run(load)
    assert tokens_of(answers) == tokens_of(expected)
    reasons = [[o.finish_reason for o in answer.outputs] for answer in answers]
    assert reasons == [[o.finish_reason for o in answer.outputs] for answer in expected]
    for prompt, (tokens,) in zip(load.prompts[:3], tokens_of(answers), strict=False):
        assert len(prompt) + len(tokens) == MAX_MODEL_LEN
    least = [params.min_tokens for params in load.params[3:]]
    lengths = [len(tokens) for (tokens,) in tokens_of(answers)[3:]]
    assert all(a <= b for a, b in zip(least, lengths, strict=True))
    assert any(a < b < 20 for a, b in zip(least, lengths, strict=True)), "none ended by itself"


def test_a_stop_token_and_max_tokens_inside_a_tree(
    oracle: Engine, plain_v2: dict[str, list[Any]]
) -> None:
    prompts, params, expected = [], [], []
    for index, ((tokens,), prompt) in enumerate(
        zip(tokens_of(plain_v2["greedy"]), small_workloads.GREEDY.prompts, strict=True)
    ):
        # One after another, to end at any place of a tree; in one batch, so that the others go on.
        end = 2 + 2 * index
        stop = tokens[end]
        prompts += [prompt, prompt]
        params += [
            SamplingParams(temperature=0, max_tokens=end, ignore_eos=True),
            SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], ignore_eos=True),
        ]
        expected += [[tokens[:end]], [tokens[: tokens.index(stop) + 1][:20]]]
    answers, cut_off = tokens_cut_off(oracle, workloads.Workload(prompts, params))
    assert tokens_of(answers) == expected
    assert cut_off > 5, "few requests ended inside a tree"
