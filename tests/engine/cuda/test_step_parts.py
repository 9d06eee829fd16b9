# SPDX-License-Identifier: Apache-2.0
"""Parts of a step: what is accepted, what dummy runs read, what schedulers tell workers."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_redrafter.engine.cuda.model_state import TreeModelState
from vllm_redrafter.engine.cuda.pipeline import UNREAD_STEPS
from vllm_redrafter.engine.cuda.scheduler import TreeScheduler
from vllm_redrafter.engine.cuda.verification import Verification


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
        table=SimpleNamespace(budget=SimpleNamespace(is_profiling=is_profiling)),
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
        arrived = pickle.loads(pickle.dumps(scheduler.schedule()))
        return getattr(arrived, UNREAD_STEPS)

    def read() -> None:
        scheduler.update_from_output(SchedulerOutput.make_empty(), None)

    assert [unread(), unread(), unread()] == [0, 1, 2]
    read()
    assert unread() == 2
    for _ in range(3):
        read()
    assert unread() == 0
