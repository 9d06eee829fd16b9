# SPDX-License-Identifier: Apache-2.0
"""The batch's budget of nodes, decided anew at every step: the answers stay plain decoding's.

Steps replay recordings in place of CUDA graphs, one graph for trees of any sizes.
"""

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from redrafter_testing.engines import budgets, inside_worker
from redrafter_testing.engines.forked_engine import Engine, reset_prefix_cache
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import no_waiting, recorded_graphs
from redrafter_testing.requests import small_workloads, workloads
from redrafter_testing.requests.answers import assert_same
from redrafter_testing.requests.workloads import Plain

pytestmark = pytest.mark.engine

DRAFTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"

RATIO = "model_runner.adaptive_verification.model.profile.acceptance_ratio"


@pytest.fixture(scope="module")
def adaptive(small_target: Path, oracle_v2: Path) -> Iterator[Engine]:
    """Chunks of prompts beside trees, a KV cache that is too small, K by batch size."""
    with interpreted_engine(
        small_target,
        setup=budgets.use,
        enforce_eager=False,
        speculative_config={
            "model": str(oracle_v2),
            "num_speculative_tokens": 12,
            "context_matches": 0,
            "num_speculative_tokens_per_batch_size": [[1, 4, 12], [5, 8, 7]],
        },
        reasoning_config=small_workloads.REASONING,
        **small_workloads.TIGHT,
    ) as llm:
        yield llm


def run_greedy(llm: Engine, plain: Plain) -> tuple[list[list[int]], float]:
    """From an empty cache as plain vLLM: nodes admitted by step and request, accepted tokens."""
    llm.call(reset_prefix_cache)
    before = llm.accepted()
    assert llm.tokens(small_workloads.GREEDY) == small_workloads.greedy_of(plain)
    (admitted,) = llm.rpc(budgets.admitted)
    return admitted, llm.accepted() - before


def test_greedy_output_equals_plain_whatever_each_step_s_budget(
    adaptive: Engine, plain_v2: Plain
) -> None:
    adaptive.rpc(recorded_graphs.replay, True)
    adaptive.rpc(budgets.force, 0.8)
    adaptive.rpc("reset_redrafter_stats")
    before = [adaptive.counter(name) for name in DRAFTED]
    admitted, accepted = run_greedy(adaptive, plain_v2)
    assert accepted > 20, "trees were hardly used"
    counted = [adaptive.counter(n) - b for n, b in zip(DRAFTED, before, strict=True)]
    (stats,) = adaptive.rpc("redrafter_stats")
    # A request's end may be known to the scheduler when its next step has begun.
    ends = len(small_workloads.GREEDY.prompts)
    assert counted[0] <= stats["verifications"] <= counted[0] + ends
    assert counted[1] <= stats["drafted_tokens"] <= counted[1] + 12 * ends
    assert counted[1] < 10 * counted[0], "vLLM would count what it schedules"
    several = [step for step in admitted if len(step) > 1]
    assert len({sum(step) for step in several}) > 5, "budgets hardly changed"
    assert sum(len(set(step)) > 1 for step in several) > 5, "lengths hardly differed"
    (levels,) = adaptive.rpc(budgets.lengths)
    assert set(levels) == {1, 3, 5}
    (replayed,) = adaptive.rpc(recorded_graphs.how_often_replayed)
    assert replayed.keys() == {"model", "draft"} and min(replayed.values()) > 5, replayed


def test_chains_grammars_and_logprobs_equal_plain_whatever_each_step_s_budget(
    adaptive: Engine, plain_v2: Plain
) -> None:
    adaptive.rpc(recorded_graphs.replay, True)
    adaptive.rpc(budgets.force, 0.8)
    adaptive.call(reset_prefix_cache)
    before = adaptive.accepted()
    assert_same(adaptive.run(small_workloads.MIXED), plain_v2["mixed"], workloads.CASES)
    assert adaptive.accepted() > before + 10, "trees were hardly used"


def test_with_a_shut_gate_nothing_is_drafted_or_verified(adaptive: Engine, plain_v2: Plain) -> None:
    adaptive.rpc(budgets.force, 0.0)
    adaptive.rpc(recorded_graphs.replay, True)
    before = [adaptive.counter(name) for name in DRAFTED]
    admitted, accepted = run_greedy(adaptive, plain_v2)
    # The last draft of the test before is still at hand in the first step.
    assert not any(sum(step) for step in admitted[1:])
    assert len(admitted) <= 4, "draft tokens are scheduled where none are drafted"
    assert accepted == 0
    assert [adaptive.counter(name) for name in DRAFTED] == before
    assert "draft" not in adaptive.rpc(recorded_graphs.how_often_replayed)[0]


def test_with_an_open_gate_the_budget_is_vllm_s_and_acceptance_is_learned(
    adaptive: Engine, plain_v2: Plain
) -> None:
    """Verification is made to cost nothing: all that fits into one chunk of logits is verified."""
    rows = 40
    adaptive.rpc(budgets.force, 1.0, False)
    adaptive.rpc(budgets.make_verification_free, rows)
    adaptive.rpc(inside_worker.sample_in_chunks, rows)
    before = adaptive.rpc(budgets.estimator)
    admitted, accepted = run_greedy(adaptive, plain_v2)
    (chunks,) = adaptive.rpc(inside_worker.stop_sampling_in_chunks)
    assert accepted > 20
    assert max(sum(step) + len(step) for step in admitted) == rows
    assert not chunks
    assert adaptive.rpc(budgets.estimator) != before
    (ratio,) = adaptive.rpc(attrgetter(RATIO))
    assert ratio[0] != 1.0, "outputs say how many nodes were accepted"


def test_without_being_forced_output_equals_plain(adaptive: Engine, plain_v2: Plain) -> None:
    """By what drafts and steps cost here, and with the waits of a step noticed."""
    adaptive.rpc(recorded_graphs.replay, False)
    adaptive.rpc(budgets.leave_alone)
    adaptive.rpc(no_waiting.watch)
    run_greedy(adaptive, plain_v2)
    ((calls, found),) = adaptive.rpc(no_waiting.findings)
    assert calls > 10
    assert not found
