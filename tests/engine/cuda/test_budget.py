"""Whether a batch drafts, and what the host knows when it decides; vLLM's manager on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from vllm_redrafter.budget.draft_lengths import SURVEY_INTERVAL
from vllm_redrafter.budget.gate import FAR_PAUSE, FIRST_PAUSE
from vllm_redrafter.engine.cuda.budget import TreeBudget
from vllm_redrafter.engine.cuda.stats import StepTimer

SLOTS, K, ROWS = 8, 3, 64
LENGTHS = (1, 3)
GOOD, BAD = [0.9, 0.8, 0.7], [0.05, 0.5, 0.5]


class NoStream:
    """A CUDA stream or event where all work is done when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class OneRank:
    """A tensor-parallel group of one."""

    def broadcast_object(self, value: Any, src: int) -> Any:
        return value


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch's compiler was given of vLLM's choice of nodes; what it makes is left out."""
    graphs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    choice: Any = adaptive_verification._assign_draft_token_budget
    name = "_assign_draft_token_budget_compiled"
    torch._dynamo.reset()
    monkeypatch.setattr(
        adaptive_verification, name, torch.compile(choice, dynamic=True, backend=keep)
    )
    return graphs


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> TreeBudget:
    """Of 8 requests of one row each; a draft costs 0.2 of a plain step, a row nearly nothing."""
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    states = SimpleNamespace(
        num_speculative_steps=K,
        device=torch.device("cpu"),
        max_num_reqs=SLOTS,
        req_id_to_index={str(slot): slot for slot in range(SLOTS)},
        num_computed_tokens_np=np.full(SLOTS, 10),
        prefill_len=SimpleNamespace(np=np.full(SLOTS, 5)),
    )
    query_start_loc = torch.zeros(SLOTS + 1, dtype=torch.int32)
    made = TreeBudget(
        states,
        query_start_loc,
        1,
        ROWS,
        meter=StepTimer(torch.device("cpu")),
        lengths=LENGTHS,
        depths=torch.zeros(SLOTS, K, dtype=torch.int32),
    )
    made.cost_tables = np.full(SLOTS + 1, 0.2), 1.0 + 0.001 * np.arange(ROWS + 1)
    made._has_tree[:] = True  # of requests that were there before
    return made


def step(budget: TreeBudget, confidences: list[float], requests: int = 2) -> tuple[int, bool]:
    """One step: how many draft tokens it verifies, and whether it drafts; these are its drafts."""
    ids = [str(slot) for slot in range(requests)]
    rows = budget.get_num_tokens(dict.fromkeys(ids, 1 + K), {i: [0] * K for i in ids})
    drafts = budget.drafts_now(possible=True)
    batch: Any = SimpleNamespace(
        num_reqs=requests,
        idx_mapping=torch.arange(requests),
        idx_mapping_np=np.arange(requests),
    )
    budget.record_confidences(torch.tensor([confidences] * requests), batch)
    return rows - requests, drafts


def steps(
    budget: TreeBudget, count: int, confidences: list[float], requests: int = 2
) -> list[tuple[int, bool]]:
    return [step(budget, confidences, requests) for _ in range(count)]


def test_drafting_goes_on_while_it_pays(budget: TreeBudget) -> None:
    assert steps(budget, 20, GOOD) == [(2 * K, True)] * 20


def test_drafting_that_does_not_pay_stops_and_nothing_is_verified_then(budget: TreeBudget) -> None:
    taken = steps(budget, FIRST_PAUSE + 8, BAD)
    # Of new requests nothing is known, and what is read of them is a step old.
    assert taken[:2] == [(2 * K, True)] * 2
    drafted = [drafts for _, drafts in taken]
    first = drafted.index(False)
    assert drafted[first : first + FIRST_PAUSE] == [False] * FIRST_PAUSE
    assert all(verified == 0 for verified, _ in taken[first + 1 :][: FIRST_PAUSE - 1])


def test_a_probe_verifies_a_node_per_request_and_is_read_without_another_draft(
    budget: TreeBudget,
) -> None:
    steps(budget, 12, BAD)
    while not step(budget, GOOD)[1]:  # up to the next probe, which finds drafts better
        pass
    verified, drafts = step(budget, GOOD)
    assert verified >= 2, "a probe that verifies nothing finds out nothing"
    assert not drafts, "its confidences are still on their way"
    assert step(budget, GOOD) == (0, True)
    assert steps(budget, 3, GOOD)[1:] == [(2 * K, True)] * 2


def test_the_gate_opens_at_once_when_the_batch_becomes_one_that_pays(budget: TreeBudget) -> None:
    draft, verify = np.full(SLOTS + 1, 0.2), 1.0 + 0.001 * np.arange(ROWS + 1)
    verify[2 * SLOTS :] += 9.0  # more than one node for each of 8 requests is expensive
    draft[SLOTS] = 5.0
    budget.cost_tables = draft, verify
    steps(budget, 12, GOOD, requests=SLOTS)
    assert not step(budget, GOOD, requests=SLOTS)[1]
    assert step(budget, GOOD, requests=2)[1]


def test_a_new_request_is_expected_to_be_as_the_others(budget: TreeBudget) -> None:
    steps(budget, 60, BAD)
    assert not budget._pays
    budget.add_request(2)
    step(budget, BAD, requests=3)
    assert not budget._pays, "vLLM would expect all of its nodes to be accepted"


def test_a_request_that_comes_while_the_gate_is_shut_does_not_open_it(budget: TreeBudget) -> None:
    steps(budget, 60, BAD)
    while not step(budget, BAD)[1]:  # a probe's confidences are copied twice
        pass
    budget.add_request(2)
    paid = []
    for _ in range(2 * FAR_PAUSE):
        step(budget, BAD, requests=3)
        paid.append(budget._pays)
    assert not any(paid)


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
    batch: Any = SimpleNamespace(
        num_reqs=len(requests),
        idx_mapping=torch.tensor(requests),
        idx_mapping_np=np.array(requests),
    )
    budget.record_confidences(torch.tensor([GOOD] * len(requests)), batch)


@torch.inference_mode()
def test_a_request_that_vllm_pads_gets_no_nodes_until_it_has_a_tree(budget: TreeBudget) -> None:
    steps(budget, 4, GOOD)
    budget.add_request(2)
    assert admitted(budget, [0, 2, 1]) == [K, 0, K]
    drafted(budget, [0, 2, 1])
    assert admitted(budget, [0, 2, 1]) == [K, K, K]
    budget.add_request(2)  # another takes the slot
    assert admitted(budget, [2]) == [0]


@torch.inference_mode()
def test_a_probe_gives_no_node_to_a_request_without_a_tree(budget: TreeBudget) -> None:
    budget.cost_tables = np.full(SLOTS + 1, 0.2), 10.0 ** np.arange(ROWS + 1)  # no node pays
    drafted(budget, [0, 1])
    budget._probing = True
    budget.add_request(2)
    nodes = admitted(budget, [0, 1, 2])
    assert sum(nodes) == 2 and nodes[2] == 0


@torch.inference_mode()
def test_who_waited_since_a_step_without_a_draft_gets_no_nodes(budget: TreeBudget) -> None:
    steps(budget, 4, GOOD, requests=3)
    drafted(budget, [0, 1, 2], drafts=False)
    drafted(budget, [0, 1])
    assert admitted(budget, [0, 1, 2]) == [K, K, 0]


def test_what_is_decided_is_counted(budget: TreeBudget) -> None:
    budget.meter.reset()
    steps(budget, 4, GOOD)
    stats = budget.meter.read()
    survival = np.cumprod(GOOD).sum()
    assert stats.expected_tokens == pytest.approx(2 * (2 * (1 + K) + 2 * (1 + survival)))
    steps(budget, 12, BAD)
    assert budget.meter.read().undrafted_steps > 5


def test_a_step_without_room_for_drafts_makes_none(budget: TreeBudget) -> None:
    assert not budget.drafts_now(possible=False)
    assert budget.drafts_now(possible=True)


def timed(budget: TreeBudget, seconds: Callable[[int], float], sizes: list[int]) -> None:
    """Let it measure drafts of so many seconds by length, and steps of 1."""
    samples = []
    for batch in budget.batches_to_profile(sizes):
        requests = min(batch["num_tokens"], SLOTS)
        draft = seconds(budget.warm_up_length)
        samples.append(StepTimingSample(1.0, draft, batch["num_tokens"], requests, True))
    budget.set_initial_cost_curves(samples)


def test_drafts_of_each_length_are_timed_for_each_number_of_requests(
    budget: TreeBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive_verification, "get_tp_group", lambda: OneRank())
    budget.req_states.max_num_batched_tokens = ROWS
    timed(budget, lambda length: 0.1 * length, [1, 4, 8, 16, ROWS])
    assert [costs.tolist() for costs in budget._draft_costs] == [
        pytest.approx([0.1 * length] * (SLOTS + 1)) for length in LENGTHS
    ]
    assert budget.cost_tables is not None
    assert budget.cost_tables[1].tolist() == [1.0] * (ROWS + 1)
    assert budget.warm_up_length == 3


def test_drafts_get_shorter_where_their_last_levels_bring_nothing(
    budget: TreeBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive_verification, "get_tp_group", lambda: OneRank())
    budget.req_states.max_num_batched_tokens = ROWS
    timed(budget, lambda length: 0.1 * length, [1, 4, 8, ROWS])
    depths = budget._depths._depths

    def lengths(confidences: list[float], count: int) -> list[int]:
        found = []
        for _ in range(count):
            step(budget, confidences)
            found.append(budget.next_length(3))
            depths[:2] = torch.arange(1, K + 1).clamp(max=found[-1])
        return found

    assert set(lengths(GOOD, 60)) == {3}
    shallow = lengths([0.9, 0.01, 0.0], 120)
    assert shallow[-2 * SURVEY_INTERVAL :].count(1) >= 2 * SURVEY_INTERVAL - 3
    assert 3 in shallow[-2 * SURVEY_INTERVAL :], "without a survey it would stay so"
    assert budget.cost_tables is not None
    assert budget.cost_tables[0][2] == pytest.approx(0.1)


@torch.inference_mode()
def test_all_that_trims_batches_is_compiled_at_start_up(
    budget: TreeBudget, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive_verification, "get_tp_group", lambda: OneRank())
    budget.req_states.max_num_batched_tokens = ROWS
    timed(budget, lambda length: 0.1 * length, [1, 4, 8, ROWS])
    at_start = len(compiled)
    assert at_start == 4
    for requests in range(1, SLOTS + 1):
        for nodes in range(1, requests * K):
            ids = [str(slot) for slot in range(requests)]
            budget._batch_budget = dict.fromkeys(ids, K), dict.fromkeys(ids, 1), nodes
            rows, *_ = budget.reallocate_drafts(ids, torch.arange(requests, dtype=torch.int32))
            assert rows[-1] == requests + nodes
    assert len(compiled) == at_start


def test_no_level_is_searched_that_is_not_verified(budget: TreeBudget) -> None:
    assert budget.next_length(1) == 1
    assert budget.next_length(3) == 3
