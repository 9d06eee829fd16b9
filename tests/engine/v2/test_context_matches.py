# SPDX-License-Identifier: Apache-2.0
"""Paths of own text and of earlier answers, beside the drafter's and alone: output is plain's.

`test_parity.py` has them beside chains, grammars and logprobs.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import budgets, inside_worker
from redrafter_testing.engines.forked_engine import Engine, reset_prefix_cache
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.few_tokens import Answers
from redrafter_testing.requests.tenants import Tenants, foreign_canaries, record_drafts

pytestmark = pytest.mark.engine

SHAPE = {"beam_width": 3, "beam_length": 3, "context_matches": 2}
STORE, KEPT = "model_runner.table.earlier.store", ("ring", "state")


def engine(target: Path, **speculative: Any) -> AbstractContextManager[Engine]:
    """Steps replay recordings in place of CUDA graphs."""
    return interpreted_engine(
        target,
        setup=recorded_graphs.use_as_a_gpu_with_long_contexts,
        enforce_eager=False,
        speculative_config={"num_speculative_tokens": 8, **speculative},
        **few_tokens.TIGHT,
    )


def run(
    llm: Engine, sampling: str, count: int = 8, forgets: bool = True
) -> tuple[list[list[int]], dict[str, float]]:
    """Answers and what was counted; from an empty cache if it `forgets`."""
    if forgets:
        llm.call(reset_prefix_cache)
    llm.rpc("reset_redrafter_stats")
    answers = llm.tokens(few_tokens.requests(sampling, count))
    (stats,) = llm.rpc("redrafter_stats")
    accepted = stats["accepted_matched_tokens"] + stats["accepted_earlier_tokens"]
    assert accepted > 5, "paths were hardly used"
    assert stats["matched_tokens"] + stats["earlier_tokens"] > accepted
    return answers, stats


def test_output_equals_plain_whatever_each_step_s_budget_and_of_matches_alone(
    few_tokens_target: Path, few_tokens_drafter: Path, few_tokens_plain: Answers
) -> None:
    with engine(few_tokens_target, model=str(few_tokens_drafter), **SHAPE) as llm:
        llm.rpc(recorded_graphs.replay, True)
        for sampling, expected in few_tokens_plain.items():
            llm.rpc(budgets.force, 0.8)
            answers, _ = run(llm, sampling)
            assert answers == expected
            (levels,) = llm.rpc(budgets.lengths)
            assert set(levels) == {0, 1, 2, 3}
        recorded_graphs.assert_replayed(llm, 10, "draft")
        assert llm.counter("vllm:num_preemptions") > 0
        llm.rpc(budgets.force, 1.0, True, 0)
        (before,) = llm.rpc(inside_worker.match_probabilities)
        answers, stats = run(llm, "sampled", count=4)
        assert answers == few_tokens_plain["sampled"][:4]
        assert llm.rpc(budgets.lengths)[0].keys() == {0}
        of_paths = stats["matched_tokens"] + stats["earlier_tokens"]
        assert of_paths == stats["drafted_tokens"], "something was searched"
        (after,) = llm.rpc(inside_worker.match_probabilities)
        assert after[0] == before[0] and after[1] != before[1], "of greedy requests, of sampled"
        launched, drafted = [], []
        for answers in (True, False):
            ((launches, _, same),) = llm.rpc(recorded_graphs.draft_on_kernels, answers)
            assert same
            launched.append(launches)
            (trees,) = llm.rpc(attrgetter("model_runner.speculator.trees.tokens"))
            drafted.append(trees[0].tolist())
        assert launched[0] == launched[1] + 1, "in drafts, earlier answers cost one launch"
        assert drafted[0] != drafted[1], "nothing was found"


@pytest.fixture(scope="module")
def searchless(few_tokens_target: Path) -> Iterator[Engine]:
    """Without a drafter."""
    with engine(few_tokens_target, method="redrafter") as llm:
        llm.rpc(inside_worker.reload_drafter)
        llm.rpc(budgets.force, 0.9)
        yield llm


def test_output_without_a_drafter_equals_plain_and_is_faster_with_what_was_answered_before(
    searchless: Engine, few_tokens_plain: Answers
) -> None:
    llm = searchless
    llm.rpc(recorded_graphs.replay, True)
    for sampling, expected in few_tokens_plain.items():
        runs = [run(llm, sampling, forgets=forgets) for forgets in (True, False)]
        (answers, first), (again, stats) = runs
        assert answers == again == expected
        assert stats["matched_tokens"] + stats["earlier_tokens"] == stats["drafted_tokens"]
        assert stats["earlier_tokens"] >= stats["accepted_earlier_tokens"] > 50
        assert stats["verifications"] < 0.8 * first["verifications"]
        ring, state = (llm.rpc(attrgetter(f"{STORE}.{of}"))[0] for of in KEPT)
        kept = str(ring[0, : state[0]].tolist())[1:-1].split("-1, ")[1:]
        assert len(expected) <= len(kept) <= 2 * len(expected), "preempted ones are not kept"
        assert all(k.startswith(tuple(str(a[:15])[1:-1] for a in expected)) for k in kept)
    recorded_graphs.assert_replayed(llm, 10, "draft")


def test_no_tenant_is_drafted_what_only_another_one_s_answers_have(searchless: Engine) -> None:
    """From graphs; tenants that share see each other's answers, but no prompts."""
    searchless.rpc(recorded_graphs.replay, True)
    searchless.rpc(record_drafts)
    asked, answered = foreign_canaries(searchless, Tenants(60, are_one=True))
    assert asked == 0 and answered > 20
    assert foreign_canaries(searchless, Tenants(60)) == [0, 0]


def test_outside_of_drafts_earlier_answers_cost_one_launch_where_requests_have_finished(
    searchless: Engine,
) -> None:
    """No more where some begin."""
    searchless.rpc(recorded_graphs.replay, False)
    most: list[Counter[str]] = []
    for keeps in (True, False):
        searchless.rpc(inside_worker.count_launches, keeps)
        for sampling in few_tokens.SAMPLING:
            run(searchless, sampling, forgets=False)
        (steps,) = searchless.rpc(attrgetter("launches"))
        assert {finished for finished, _ in steps} == {False, True}
        most.append(Counter())
        for finished, launched in steps:
            assert launched["_enter_answers"] == (finished and keeps)
            most[-1] |= launched
    assert most[0] - most[1] == {"_enter_answers": 1}
