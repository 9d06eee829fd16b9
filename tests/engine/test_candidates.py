# SPDX-License-Identifier: Apache-2.0
"""Drafts that choose among candidates: output equals plain, and kernels draft what torch does."""

from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.inside_cpu_worker import record_candidates
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.models.tiny_models import make_reciting, make_small_target
from redrafter_testing.models.training_data import answered
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.few_tokens import Answers
from vllm_redrafter.config import FEWEST_CANDIDATES, USUAL_CANDIDATES
from vllm_redrafter.heads.selector import SelectorConfig

pytestmark = pytest.mark.engine

HEADS: dict[str, dict[str, int]] = {"gated": {}, "recurrent": {"candidates": 64}}
LAUNCHES = {"gated": 9 + 3 * 4, "recurrent": 11 + 3 * 6}
"""Of a search of four levels; a tree is two more."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It ranks enough tokens."""
    return make_small_target(tmp_path_factory.mktemp("target"), vocab_size=512)


@pytest.fixture(scope="module")
def expected(target: Path) -> Answers:
    with cpu_engine(target) as plain:
        return few_tokens.answers_of(plain)


@pytest.fixture(scope="module", params=HEADS)
def speculative(
    request: pytest.FixtureRequest,
    target: Path,
    expected: Answers,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Of a head that knows the greedy answers by heart."""
    rows = list(map(answered, few_tokens.requests("greedy").prompts, expected["greedy"]))
    folder, selector = tmp_path_factory.mktemp("drafter"), SelectorConfig(3, 16)
    drafter = make_reciting(folder, target, rows, request.param, selector=selector)
    fixed = {"num_speculative_tokens": 8, "adaptive": False, "beam_length": 4}
    return {"model": str(drafter), **fixed, "context_matches": 0, **HEADS[request.param]}


def test_the_cpu_engine_s_output_equals_plain(
    target: Path, expected: Answers, speculative: dict[str, Any]
) -> None:
    with cpu_engine(target, speculative_config=speculative) as llm:
        llm.rpc(record_candidates)
        assert few_tokens.answers_of(llm) == expected
        assert llm.accepted() > 20
        (counts,) = llm.rpc(attrgetter("candidates"))
    usual = speculative.get("candidates", USUAL_CANDIDATES)
    assert (min(counts), max(counts)) == (FEWEST_CANDIDATES, usual)


def test_the_v2_engine_s_output_from_graphs_equals_plain(
    target: Path, expected: Answers, speculative: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with interpreted_engine(
        target,
        setup=partial(recorded_graphs.use, (1, 9)),
        enforce_eager=False,
        compilation_config={"mode": 0},
        max_num_seqs=1,
        max_num_batched_tokens=64,
        speculative_config=speculative,
    ) as llm:
        llm.rpc(recorded_graphs.replay, True)
        assert llm.tokens(few_tokens.requests("greedy", count=3)) == expected["greedy"][:3]
        assert llm.accepted() > 20
        ((launched, _, same_on_kernels),) = llm.rpc(recorded_graphs.draft_on_kernels)
    assert same_on_kernels and launched == 2 + LAUNCHES[request.node.callspec.params["speculative"]]
