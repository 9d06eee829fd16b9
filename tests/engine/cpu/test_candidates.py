# SPDX-License-Identifier: Apache-2.0
"""Drafts that choose among candidates are answered for as by plain vLLM."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from redrafter_testing.engines import searched_candidates
from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.models.tiny_models import make_reciting, make_small_target
from redrafter_testing.models.training_data import answered
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of
from vllm_redrafter.config import FEWEST_CANDIDATES, USUAL_CANDIDATES
from vllm_redrafter.heads.selector import SelectorConfig

pytestmark = pytest.mark.engine

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
LENGTH = 4


class Plain(NamedTuple):
    """A target that ranks enough tokens to choose among, and its answers, by sampling."""

    target: Path
    answers: dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    target = make_small_target(tmp_path_factory.mktemp("target"), vocab_size=512)
    with cpu_engine(target, skip_tokenizer_init=True) as llm:
        answers = {
            sampling: single_tokens_of(llm.run(few_tokens.requests(sampling)))
            for sampling in few_tokens.SAMPLING
        }
    return Plain(target, answers)


class Case(NamedTuple):
    """A head, what a user says of candidates, and how many a single request's draft has."""

    head: str
    said: dict[str, int]
    expected: int


CASES = [
    Case("gated", {}, USUAL_CANDIDATES),
    Case("recurrent", {"candidates": 64}, 64),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.head)
def engine(
    request: pytest.FixtureRequest, plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, int]]:
    """With the most candidates of its drafts; its head knows the greedy answers by heart."""
    case = request.param
    asked = few_tokens.requests("greedy").prompts
    rows = list(map(answered, asked, plain.answers["greedy"]))
    folder = tmp_path_factory.mktemp(case.head)
    selector = SelectorConfig(LENGTH - 1, 16)
    drafter = make_reciting(folder, plain.target, rows, case.head, selector=selector)
    config = {"model": str(drafter), "num_speculative_tokens": 8, "beam_length": LENGTH}
    config |= {"adaptive": False, "context_matches": 0, **case.said}
    with cpu_engine(
        plain.target,
        setup=searched_candidates.record,
        skip_tokenizer_init=True,
        speculative_config=config,
    ) as llm:
        yield llm, case.expected


@pytest.mark.parametrize("sampling", few_tokens.SAMPLING)
def test_output_equals_plain(sampling: str, engine: tuple[Engine, int], plain: Plain) -> None:
    llm, expected = engine
    before = llm.counter(ACCEPTED)
    assert single_tokens_of(llm.run(few_tokens.requests(sampling))) == plain.answers[sampling]
    if sampling == "greedy":
        assert llm.counter(ACCEPTED) - before > 20, "trees were hardly used"
    (counts,) = llm.rpc(searched_candidates.recorded)
    assert (min(counts), max(counts)) == (FEWEST_CANDIDATES, expected)
