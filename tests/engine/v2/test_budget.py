# SPDX-License-Identifier: Apache-2.0
"""Whether a batch drafts, and what the host knows when it decides; vLLM's manager on a CPU."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.async_utils import StepTimingSample

from redrafter_testing.engines.host_budget import host_budget
from redrafter_testing.gpu.triton_interpreter import import_interpreted, interpreted
from vllm_redrafter.budget.acceptance import SurvivalProfile
from vllm_redrafter.budget.planner import BLOCK, ArmChoice

import_interpreted("vllm_redrafter.triton_kernels.admit_nodes", "vllm_redrafter.engine.v2.budget")
from vllm_redrafter.engine.v2 import budget as budget_module  # noqa: E402
from vllm_redrafter.engine.v2.budget import TreeBudget  # noqa: E402

SLOTS, K, ROWS = 8, 3, 64
LENGTHS = (1, 3)
GOOD, BAD = [0.9, 0.8, 0.7], [0.05, 0.5, 0.5]


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[TreeBudget]:
    """Of 8 requests of one row each; a draft costs 0.2 of a plain step, a row nearly nothing."""
    clock = SimpleNamespace(ms=0.0)
    sizes = SLOTS, K, ROWS, LENGTHS
    made = host_budget(monkeypatch, budget_module, lambda: clock.ms, *sizes)
    made.model.draft_costs = [np.full(SLOTS + 1, 0.2)] * len(LENGTHS)
    made.model.verify_costs = 1.0 + 0.001 * np.arange(ROWS + 1)
    made._has_tree[:] = True  # of requests that were there before
    vars(made)["clock"] = clock
    with interpreted():
        yield made


def batch_of(slots: Sequence[int]) -> Any:
    """As much of an InputBatch as is read."""
    return SimpleNamespace(idx_mapping_np=np.array(slots))


def record(budget: TreeBudget, confidences: list[float], slots: Sequence[int]) -> None:
    """End a step, of which a draft has written these."""
    if budget._drafted:
        budget._trees.probs[slots, 1:] = torch.tensor(confidences)
    budget.record_confidences(budget._trees.probs, batch_of(slots))


def step(
    budget: TreeBudget,
    confidences: list[float],
    requests: int = 2,
    of_matches: list[float] | None = None,
) -> tuple[int, bool]:
    """One step: how many draft tokens it verifies, and whether it drafts; these are its drafts'
    confidences. Drafts of matches alone have others."""
    ids = [str(slot) for slot in range(requests)]
    rows = budget.get_num_tokens(dict.fromkeys(ids, 1 + K), {i: [0] * K for i in ids})
    # Steps take what was measured at start-up, all of it on the device.
    vars(budget)["clock"].ms += budget.times._table
    budget.times.waited += budget.times._table
    drafts = budget.drafts_now(possible=True)
    if drafts:
        levels = torch.arange(1, K + 1, dtype=torch.int32)
        if (length := budget.next_length(K)) == 0:
            assert of_matches is not None
            confidences, length = of_matches, K
        is_node = torch.tensor(confidences) > 0
        depths = torch.where(is_node, levels.clamp(max=length), 0)
        budget._trees.depths[:requests, 1:] = depths
    record(budget, confidences, range(requests))
    return rows - requests, drafts


def steps(
    budget: TreeBudget, count: int, confidences: list[float], requests: int = 2
) -> list[tuple[int, bool]]:
    return [step(budget, confidences, requests) for _ in range(count)]


def lengths_of(
    budget: TreeBudget, count: int, confidences: list[float], of_matches: list[float] | None = None
) -> list[int | None]:
    """The draft's length in each of so many steps, None where there is no draft."""
    return [
        budget._length if step(budget, confidences, of_matches=of_matches)[1] else None
        for _ in range(count)
    ]


def test_drafting_that_does_not_pay_stops_and_nothing_is_verified_then(budget: TreeBudget) -> None:
    taken = steps(budget, 300, BAD)
    # Of new requests nothing is known, and what is read of them is a step old.
    assert taken[:2] == [(2 * K, True)] * 2
    assert taken[-100:].count((0, False)) >= 100 - 2 * (BLOCK + 1), "but for explorations"
    # Those that come then are expected to be as the others of their kind.
    for slot in (2, 3):
        budget.add_request(slot)
    budget.samples[3], budget._drafted = True, True
    record(budget, BAD, range(2))
    greedy, sampled = budget._confidences[budget._stale_idx][[2, 3]]
    assert greedy[0] < 0.6, "vLLM would expect all of its nodes to be accepted"
    assert (sampled == 1).all(), "of those that sample nothing is known"


def test_a_drafter_that_becomes_good_is_used(budget: TreeBudget) -> None:
    budget.meter.reset()
    assert steps(budget, 4, GOOD) == [(2 * K, True)] * 4
    expected = 2 * (2 * (1 + K) + 2 * (1 + np.cumprod(GOOD).sum()))
    assert budget.meter.read().expected_tokens == pytest.approx(expected)
    stats = budget.meter.stats
    assert stats.decoding_seconds == 0, "no plain step was timed"
    steps(budget, 1000, BAD)
    steps(budget, 1500, GOOD)
    stats.reset()
    drafting = steps(budget, 500, GOOD)
    assert drafting.count((2 * K, True)) >= 500 - 2 * (BLOCK + 1), "but for explorations"
    gain = stats.plain_seconds / stats.decoding_seconds
    assert gain == pytest.approx((1 + np.cumprod(GOOD).sum()) / 1.2, rel=0.05)
    budget.get_num_tokens({"0": 1, "1": ROWS - 1}, {})  # there is no room for nodes
    assert budget.drafts_now(possible=True) and not budget.drafts_now(possible=False)


def test_a_batch_for_which_drafts_pay_drafts_at_once(budget: TreeBudget) -> None:
    draft, verify = np.full(SLOTS + 1, 0.2), 1.0 + 0.001 * np.arange(ROWS + 1)
    verify[2 * SLOTS :] += 9.0  # more than one node for each of 8 requests is expensive
    draft[SLOTS] = 5.0
    budget.model.draft_costs, budget.model.verify_costs = [draft] * len(LENGTHS), verify
    steps(budget, 12 + BLOCK, GOOD, requests=SLOTS)
    assert not step(budget, GOOD, requests=SLOTS)[1]
    assert step(budget, GOOD, requests=2)[1]


def test_greedy_and_sampled_requests_are_judged_each_by_their_own(budget: TreeBudget) -> None:
    budget.samples[1] = True
    steps(budget, 4, GOOD)
    assert budget.expected == pytest.approx([np.cumprod(GOOD).sum()] * 2)
    budget.judged.append((np.full(2, 900.0), np.array([900.0, 90.0])))
    budget.model.verify_costs = 1.0 + 0.3 * np.arange(ROWS + 1)
    assert steps(budget, 2 * BLOCK, GOOD, requests=1)[-1] == (K, True)
    budget.samples[0] = True
    assert steps(budget, 2 * BLOCK, GOOD, requests=1)[-1] == (0, False)


@pytest.fixture
def matching_budget(budget: TreeBudget) -> TreeBudget:
    """Drafts may also be of paths alone, of two of three tokens; these cost next to nothing."""
    budget.lengths = (0, *LENGTHS)
    budget.model._lengths = budget.lengths
    budget.model.draft_costs = [np.full(SLOTS + 1, 0.01), *budget.model.draft_costs]
    budget.arms, budget._arm = ArmChoice((0, 1, len(budget.lengths))), len(budget.lengths)
    budget.model.match_profile = SurvivalProfile(3, 2)
    return budget


@pytest.mark.parametrize("repeats", [True, False])
def test_matches_alone_are_used_where_the_text_repeats_and_rarely_tried_elsewhere(
    matching_budget: TreeBudget, repeats: bool
) -> None:
    survival = matching_budget.model.match_profile.survival
    if repeats:
        assert lengths_of(matching_budget, 1000, BAD, GOOD)[-300:].count(0) > 250
        assert survival[0, :, 0] == pytest.approx(np.cumprod(GOOD), abs=0.1)
    else:
        lengths = lengths_of(matching_budget, 3000, BAD, [0.0] * K)[-1500:]
        assert 0 < lengths.count(0) < 150, "without an exploration it would stay so"
        assert lengths.count(None) > 1200
        assert survival[0].max() < 0.1


def test_paths_deeper_than_a_search_are_reckoned_with(matching_budget: TreeBudget) -> None:
    """Beside a search of one level, which finds next to nothing."""
    matching_budget.model.profile.survival[:] = 0.01
    rates = []
    batch = matching_budget._batch({"0": 1, "1": 1}, {})
    for probable in (0.001, 0.9):
        matching_budget.model.match_profile.survival[:] = probable
        rates.append(matching_budget.model.rates(batch))
    plain, _, short, longest = range(4)
    assert rates[0][plain] == rates[1][plain] and rates[0][longest] == rates[1][longest]
    assert rates[1][short] > 1.5 * rates[0][short]


def admitted(budget: TreeBudget, requests: Sequence[int]) -> list[int]:
    """How many nodes each of these requests gets, in a step where vLLM schedules K for each."""
    ids = [str(slot) for slot in requests]
    rows = budget.get_num_tokens(dict.fromkeys(ids, 1 + K), {i: [-1] * K for i in ids})
    scheduled = np.full(len(ids), K), np.full(len(ids), 1 + K), np.arange(len(ids) + 1) * (1 + K)
    on_host, _ = budget.compact_batch(*scheduled)
    first_rows, *_ = budget.reallocate_drafts(ids, torch.tensor(requests))
    nodes: list[int] = (first_rows.diff() - 1).tolist()
    assert sum(nodes) == rows - len(ids) == on_host.sum() - len(ids)
    return nodes


def drafted(budget: TreeBudget, requests: Sequence[int], drafts: bool = True) -> None:
    """The step's end: a draft for these requests, or none."""
    budget._drafted = drafts
    record(budget, GOOD, requests)


@torch.inference_mode()
def test_a_request_that_vllm_pads_gets_no_nodes_until_it_has_a_tree(budget: TreeBudget) -> None:
    steps(budget, 4, GOOD)
    budget.add_request(2)
    assert admitted(budget, [0, 2, 1]) == [K, 0, K]
    drafted(budget, [0, 2, 1])
    assert admitted(budget, [0, 2, 1]) == [K, K, K]
    budget.add_request(2)  # another takes the slot
    assert admitted(budget, [2]) == [0]
    drafted(budget, [0, 1, 2], drafts=False)
    drafted(budget, [0, 1])  # 2 waits since a step without a draft
    assert admitted(budget, [0, 1, 2]) == [K, K, 0]
    # An exploration where no node pays.
    budget.model.verify_costs = 10.0 ** np.arange(ROWS + 1)
    budget._explores = True
    nodes = admitted(budget, [0, 1, 2])
    assert sum(nodes) == 2 and nodes[2] == 0


@pytest.fixture
def measured(budget: TreeBudget, monkeypatch: pytest.MonkeyPatch) -> TreeBudget:
    """It measured drafts of 0.1 s a level, and steps of 1 s."""
    budget.req_states.max_num_batched_tokens = ROWS
    samples = []
    for batch in budget.batches_to_profile([1, 4, 8, ROWS]):
        rows, seconds = batch["num_tokens"], 0.1 * budget.profiled_length
        samples.append(StepTimingSample(1.0, seconds, rows, min(rows, SLOTS), True))
    with torch.inference_mode():
        budget.set_initial_cost_curves(samples)
    return budget


def test_drafts_get_shorter_where_their_last_levels_bring_nothing(measured: TreeBudget) -> None:
    for costs, length in zip(measured.model.draft_costs, LENGTHS, strict=True):
        assert costs == pytest.approx([0.1 * length] * (SLOTS + 1))
    assert measured.cost_tables is not None
    assert measured.cost_tables[1].tolist() == [1.0] * (ROWS + 1)
    assert measured.next_length(1) == 1, "no level is searched that is not verified"
    assert set(lengths_of(measured, 60, GOOD)) == {3}
    shallow = lengths_of(measured, 1000, [0.9, 0.01, 0.0])[-600:]
    assert shallow.count(1) / len(shallow) > 0.9
    assert 3 in shallow, "without an exploration it would stay so"


def test_steps_without_a_draft_cost_what_a_drafter_with_a_cache_reads(budget: TreeBudget) -> None:
    """A draft takes as long as a step of the target, most of it for what is read in any case."""
    some = [0.5, 0.2, 0.1]
    budget.model.draft_costs = [np.full(SLOTS + 1, 1.0)] * len(LENGTHS)
    assert lengths_of(budget, 600, some)[-200:].count(None) > 180
    budget.model.follow_costs = np.full(SLOTS + 1, 0.9)
    assert lengths_of(budget, 600, some)[-200:].count(None) < 20
