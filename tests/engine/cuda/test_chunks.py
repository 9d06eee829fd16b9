# SPDX-License-Identifier: Apache-2.0
"""Logits above 1 GB are sampled in chunks of requests: the answers stay the same."""

from typing import Any

import pytest

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.requests import small_workloads, workloads
from redrafter_testing.requests.answers import assert_logprobs_close, tokens_of

pytestmark = pytest.mark.engine

CASES = ("top-p", "logprobs", "greedy-logprobs", "repetition-penalty", "json", "regex-greedy")
ROWS = 30
"""Two trees of 13 nodes fit into a chunk, and some rows of one node."""


def test_sampling_in_chunks_changes_nothing(oracle: Engine, plain_v2: dict[str, list[Any]]) -> None:
    mixed = small_workloads.MIXED
    chosen = [i for i, case in enumerate(workloads.CASES) if case.name in CASES]
    load = workloads.Workload(
        [*(mixed.prompts[i] for i in chosen), *small_workloads.GREEDY.prompts[:2]],
        [*(mixed.params[i] for i in chosen), *small_workloads.GREEDY.params[:2]],
    )
    oracle.rpc(inside_worker.sample_in_chunks, ROWS)
    answers = oracle.run(load)
    (chunks,) = oracle.rpc(inside_worker.stop_sampling_in_chunks)
    assert sum(number > 1 for number in chunks) > 10
    expected = [plain_v2["mixed"][i] for i in chosen]
    for index, answer, wanted in zip(chosen, answers, expected, strict=False):
        assert tokens_of([answer]) == tokens_of([wanted]), workloads.CASES[index].name
        assert_logprobs_close(answer, wanted)
    assert tokens_of(answers[len(chosen) :]) == [
        [tokens[: small_workloads.GREEDY_TOKENS] for tokens in answer]
        for answer in tokens_of(plain_v2["greedy"][:2])
    ]
