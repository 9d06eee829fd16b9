# SPDX-License-Identifier: Apache-2.0
"""What our schedulers tell workers beside what vLLM's do."""

import pickle

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_redrafter.engine.cuda.pipeline import UNREAD_STEPS
from vllm_redrafter.engine.cuda.scheduler import TreeScheduler


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
