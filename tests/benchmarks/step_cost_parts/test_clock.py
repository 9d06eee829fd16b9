"""The clock around the parts of a step: what it counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from step_cost_parts.clock import PARTS, StepClock, install, read


class Clock:
    """A time that tests set; makes events."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self) -> Any:
        made = SimpleNamespace()
        made.record = lambda: setattr(made, "at", self.now)
        made.elapsed_time = lambda end: end.at - made.at
        return made

    def takes(self, milliseconds: float) -> Any:
        def work(*args: Any, **kwargs: Any) -> str:
            self.now += milliseconds
            return "done"

        return work


def test_a_step_is_split_into_its_parts_and_the_gap() -> None:
    time = Clock()
    clock = StepClock(time.event)
    compact = clock.timed("compact", time.takes(0.25))

    def score() -> None:
        time.takes(1)()
        compact()

    accept = clock.timed("accept", score)
    verify, draft = clock.timed("verify", time.takes(5)), clock.timed("draft", time.takes(2))
    for _ in range(3):
        clock.begin(4, prompt_tokens=False)
        assert verify() == "done"
        accept()
        draft()
        time.takes(0.5)()
    expected = {"verify": 5, "accept": 1, "compact": 0.25, "draft": 2, "step": 8.75, "gap": 0.5}
    assert clock.read(4) == [expected, expected]
    assert clock.read(4) == []


def test_steps_of_other_batches_and_with_prompts_are_left_out() -> None:
    time = Clock()
    clock = StepClock(time.event)
    verify = clock.timed("verify", time.takes(5))
    for requests, prompt in [(2, True), (2, False), (2, False), (1, False), (2, False)]:
        clock.begin(requests, prompt)
        verify()
    steps = clock.read(2)
    assert [step["step"] for step in steps] == [5]
    assert steps[0]["draft"] == 0


def test_the_clock_is_put_around_the_runner_s_methods() -> None:
    called = []
    runner = SimpleNamespace(
        execute_model=lambda scheduled: called.append("execute"),
        sample=lambda: called.append("sample"),
        speculator=SimpleNamespace(propose=lambda: called.append("propose")),
        model_state=SimpleNamespace(compact=lambda: called.append("compact")),
    )
    worker = SimpleNamespace(model_runner=runner)
    install(worker, on_host=True)
    for step in range(3):
        tokens = {"a": 4, "b": 4 if step else 9}
        runner.execute_model(
            SimpleNamespace(
                num_scheduled_tokens=tokens,
                scheduled_spec_decode_tokens={"a": [1, 2, 3], "b": [1, 2, 3]},
                scheduled_new_reqs=[],
            )
        )
        runner.sample()
        runner.model_state.compact()
        runner.speculator.propose()
    assert called == ["execute", "sample", "compact", "propose"] * 3
    (step,) = read(worker, 2, on_host=True)
    assert step["step"] == pytest.approx(step["gap"] + sum(step[part] for part in PARTS))
