# SPDX-License-Identifier: Apache-2.0
"""Continuations found in the text, verified beside the drafter's and alone: output is plain's."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forced_budget import force
from redrafter_testing.engines.forked_engine import Engine, answers_in_steps
from redrafter_testing.engines.matching import MatchesAlone
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of
from vllm_redrafter.tree.context_matches import find_matches

pytestmark = pytest.mark.engine

SETTINGS = {"num_speculative_tokens": 12, "context_matches": 3}


@pytest.fixture(
    scope="module",
    params=product([True, False], [True, False]),
    ids=["adaptive", "adaptive without a drafter", "fixed", "fixed without a drafter"],
)
def engine(
    request: pytest.FixtureRequest, few_tokens_target: Path, few_tokens_drafter: Path
) -> Iterator[Engine]:
    """Too few blocks for all requests: some are preempted."""
    adaptive, has_drafter = request.param
    config = {"method": "redrafter", "adaptive": adaptive, **SETTINGS}
    if has_drafter:
        config |= {"model": str(few_tokens_drafter), "beam_width": 3, "beam_length": 3}
    with cpu_engine(
        few_tokens_target,
        skip_tokenizer_init=True,
        speculative_config=config,
        enable_prefix_caching=True,
        max_num_batched_tokens=160,
        num_gpu_blocks_override=17,
    ) as llm:
        if adaptive:
            llm.rpc(force, MatchesAlone)
        yield llm


@pytest.fixture(scope="module")
def plain(few_tokens_target: Path) -> dict[str, list[list[int]]]:
    with cpu_engine(few_tokens_target, skip_tokenizer_init=True) as llm:
        return {
            sampling: single_tokens_of(llm.run(few_tokens.requests(sampling)))
            for sampling in few_tokens.SAMPLING
        }


@pytest.mark.parametrize("sampling", few_tokens.SAMPLING)
def test_output_equals_plain(
    sampling: str, engine: Engine, plain: dict[str, list[list[int]]]
) -> None:
    preempted = engine.counter("vllm:num_preemptions")
    engine.rpc("reset_redrafter_stats")
    answers = single_tokens_of(engine.run(few_tokens.requests(sampling)))
    assert answers == plain[sampling]
    (stats,) = engine.rpc("redrafter_stats")
    assert stats["accepted_matched_tokens"] > 10, "paths were hardly used"
    assert stats["matched_tokens"] >= stats["accepted_matched_tokens"]
    assert engine.counter("vllm:num_preemptions") > preempted


def num_matched(text: list[int], accepted: list[int]) -> int:
    """How many of a step's accepted tokens, its first ones, continue a match of the text."""
    if not accepted:
        return 0
    sizes = SETTINGS["context_matches"], len(accepted), max(text) + 1
    (paths,) = find_matches(torch.tensor([text]), torch.tensor([len(text)]), *sizes).tokens
    return int((paths == torch.tensor(accepted)).cumprod(dim=1).sum(dim=1).max())


def test_as_many_are_counted_as_follow_from_the_answers(engine: Engine) -> None:
    workload = few_tokens.requests("greedy")
    engine.rpc("reset_redrafter_stats")
    answers = engine.call(answers_in_steps, workload)
    (stats,) = engine.rpc("redrafter_stats")
    found = 0
    for prompt, steps in zip(workload.prompts, answers, strict=True):
        text = [*prompt]
        for step in steps:
            found += num_matched(text, step[:-1])
            text += step
    # Some answers end within a path, of which the engine has accepted more.
    behind = stats["accepted_matched_tokens"] - found
    assert 0 <= behind <= len(answers) < found
