# SPDX-License-Identifier: Apache-2.0
"""Parts of a step and of its worker: what is moved, what dummy runs read, what schedulers tell
workers, what the step's meter counts and what of it reaches a front end."""

import logging
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec
from vllm.v1.worker.worker_base import WorkerBase

from redrafter_testing.gpu.no_waiting import NoWaiting
from vllm_redrafter import ConfigError
from vllm_redrafter.engine import published
from vllm_redrafter.engine.published import Counters, Publisher, subscribe
from vllm_redrafter.engine.v2 import worker
from vllm_redrafter.engine.v2.model_state import TreeModelState
from vllm_redrafter.engine.v2.pipeline import UNREAD_STEPS
from vllm_redrafter.engine.v2.scheduler import AsyncTreeScheduler, TreeScheduler, _VerifiedOutput
from vllm_redrafter.engine.v2.stats import StepTimer
from vllm_redrafter.engine.v2.verification import Verification
from vllm_redrafter.engine.v2.worker import TreeWorker


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: 1 if x[0] else 0,
    ],
)
def test_waiting_for_the_device_is_noticed(waits: Callable[[torch.Tensor], Any]) -> None:
    """As `test_parity.py` relies on."""
    watcher = NoWaiting()
    with watcher.watching():
        waits(torch.tensor([1.0, 0.0, 2.0]))
    assert watcher.found


def test_a_cache_that_layers_share_is_moved_once_and_caches_may_differ_in_shape() -> None:
    local, wide = (torch.zeros(3, 1, 32, 2 * size) for size in (256, 512))
    step = Verification(1, 4, torch.device("cpu"))
    step.use_caches(torch.zeros(1, 5), [[local, wide, local, wide, wide]])
    (tables,) = step._caches
    moved = sorted(table.bases.tolist() for table in tables)
    assert moved == sorted([[local.data_ptr()], [wide.data_ptr()]])


@pytest.mark.parametrize("is_profiling", [True, False])
def test_costs_are_measured_with_the_embeddings_of_different_tokens(is_profiling: bool) -> None:
    table = torch.randn(50, 4)
    state: Any = object.__new__(TreeModelState)
    vars(state).update(
        table=SimpleNamespace(budget=SimpleNamespace(profiled_length=0 if is_profiling else None)),
        supports_mm_inputs=True,
        encoder_runner=SimpleNamespace(inputs_embeds=torch.zeros(64, 4)),
        model_config=SimpleNamespace(get_vocab_size=lambda: 50),
        model=SimpleNamespace(embed_input_ids=table.__getitem__),
        device=torch.device("cpu"),
    )
    embeds = state.dummy_inputs_embeds(32)
    assert embeds.data_ptr() == state.encoder_runner.inputs_embeds.data_ptr(), "graphs read it"
    assert (embeds.unique(dim=0).shape[0] > 16) == is_profiling


def test_a_step_says_how_many_before_it_are_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "schedule", lambda self: SchedulerOutput.make_empty())
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, *outputs: {})
    scheduler = object.__new__(TreeScheduler)

    def unread() -> int:
        return getattr(pickle.loads(pickle.dumps(scheduler.schedule())), UNREAD_STEPS)

    def read() -> None:
        scheduler.update_from_output(SchedulerOutput.make_empty(), None)

    assert [unread(), unread(), unread()] == [0, 1, 2]
    read()
    assert unread() == 2
    for _ in range(3):
        read()
    assert unread() == 0


def test_no_draft_tokens_are_scheduled_after_steps_planned_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    def take(self: Any, output: SchedulerOutput) -> None:
        taken.append(output.num_spec_tokens_to_schedule)

    monkeypatch.setattr(AsyncScheduler, "_update_after_schedule", take)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, *outputs: {})
    scheduler, step = object.__new__(AsyncTreeScheduler), SchedulerOutput.make_empty()
    step.num_spec_tokens_to_schedule = 5
    for drafts in (True, False, False, True):
        scheduler.update_from_output(step, _VerifiedOutput([], {}, drafts=drafts))
        scheduler._update_after_schedule(step)
    assert taken == [5, 0, 0, 5]
    assert step.num_spec_tokens_to_schedule == 5, "a step may draft at any time"


# Recurrent states

K = 3
STATE = MambaSpec(
    block_size=64,
    shapes=((4, 256), (2, 128)),
    dtypes=(torch.float32, torch.float32),
    num_speculative_blocks=K,
)
ATTENTION = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.float32)
HYBRID: dict[str, KVCacheSpec] = {"0": STATE, "1": ATTENTION, "2": STATE}
NEEDED = 2 * (K + 1) * 4 * (4 * 256 + 2 * 128)


class Worker(WorkerBase):
    """vLLM's, with so much memory and such layers."""

    def __init__(self, available: int, specs: dict[str, KVCacheSpec]) -> None:
        self.available, self.specs = available, specs
        self.vllm_config = SimpleNamespace(num_speculative_tokens=K)

    def determine_available_memory(self) -> int:
        return self.available

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.specs


def check(available: int, specs: dict[str, KVCacheSpec]) -> int:
    checked: Any = type("Checked", (TreeWorker, Worker), {"__init__": Worker.__init__})
    return int(checked(available, specs).determine_available_memory())


def test_recurrent_states_are_announced_or_refused_with_the_remedy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "logger", logging.getLogger("states"))
    with caplog.at_level(logging.INFO, "states"):
        assert check(NEEDED, HYBRID) == NEEDED
        assert check(7, {"0": ATTENTION}) == 7
    (said,) = caplog.messages
    assert said.startswith("With num_speculative_tokens=3 a request keeps 4 recurrent states")
    with pytest.raises(ConfigError, match=r"=3 a request keeps 4 recurrent states .*: lower num_"):
        check(NEEDED - 1, HYBRID)


# The meter


@pytest.fixture
def meter(host_events: None) -> StepTimer:
    return StepTimer(torch.device("cpu"))


@pytest.fixture
def subscriber(
    meter: StepTimer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Counters]]:
    """Reads what the meter publishes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(published.DIRECTORY, raising=False)
    published.open_directory()
    meter.publisher = Publisher(engine=0)
    yield subscribe(engine=0)
    published.close_directory()


def step(meter: StepTimer) -> None:
    """A tree of 3 nodes is verified and one accepted; two are of own text, one of an answer."""
    with meter.measure("draft"):
        meter.counts += torch.tensor([1, 2, 2, 2, 1, 1, 0])
    meter.stats.steps += 1
    meter.stats.expected_tokens += 1.5
    meter.stats.undrafted_steps += 1
    meter.publish()


def test_counts_reach_the_front_end_a_step_late_and_a_reset_takes_nothing_from_its_totals(
    meter: StepTimer, subscriber: Callable[[], Counters]
) -> None:
    step(meter)
    assert subscriber() == Counters(1, 0, 0, 0, 1.5, 1)
    assert meter.read().draft == 0, "times are taken from the first reset on"
    meter.reset()
    step(meter)
    assert subscriber() == Counters(2, 1, 2, 2, 3.0, 2, 2, 1, 1, 0)
    meter.publish()
    assert subscriber() == Counters(2, 2, 4, 4, 3.0, 2, 4, 2, 2, 0)
    assert Counters.of(meter.read()) == Counters(1, 1, 2, 2, 1.5, 1, 2, 1, 1, 0)
    assert meter.read().draft > 0
