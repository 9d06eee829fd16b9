# SPDX-License-Identifier: Apache-2.0
"""The loop over an engine's steps: what is in flight, and what is counted."""

import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from throughput_parts import engine
from throughput_parts.engine import Case, Generation, Job, generate


@dataclass
class FakeEngine:
    """Two tokens per step and request, except for the first; a request has six."""

    tokens: dict[str, int] = field(default_factory=dict)
    most_in_flight: int = 0

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert prompt["prompt_token_ids"] == [int(request_id)]
        self.tokens[request_id] = 0

    def step(self) -> list[Any]:
        self.most_in_flight = max(self.most_in_flight, len(self.tokens))
        outputs = []
        for request in list(self.tokens):
            count = 2 if self.tokens[request] else 1
            self.tokens[request] += count
            finished = self.tokens[request] >= 6
            outputs.append(
                SimpleNamespace(
                    request_id=request,
                    finished=finished,
                    outputs=[SimpleNamespace(token_ids=[int(request)] * count)],
                )
            )
            if finished:
                del self.tokens[request]
        return outputs


def test_requests_are_kept_in_flight_and_steps_are_counted() -> None:
    fake = FakeEngine()
    llm = SimpleNamespace(llm_engine=fake)

    made = generate(llm, [[i] for i in range(5)], params=[None] * 5, concurrency=2)

    assert made.outputs == [[i] * 7 for i in range(5)]
    assert fake.most_in_flight == 2
    assert (made.steps, made.request_steps) == (12, 20)
    assert made.seconds > 0


def test_low_concurrency_answers_the_first_of_the_prompts() -> None:
    prompts = [[i] for i in range(12)]

    def job(prompts_per_request: int | None) -> Job:
        return Job({}, 0, prompts, prompts_per_request, 8, False, False, [None] * 12)

    assert [len(job(2).prompts_at(Case(level, 0.0))) for level in (1, 2, 8)] == [2, 4, 12]
    assert job(2).prompts_at(Case(2, 0.7)) == prompts[:4]
    assert job(None).prompts_at(Case(1, 0.0)) == prompts


def test_lengths_of_requests_are_drawn_and_the_same_for_every_method() -> None:
    job = Job({}, 0, [[1]], None, 96, True, False, [None])
    assert job.lengths(3) == [96, 96, 96]
    drawn = replace(job, min_tokens=48).lengths(200)
    assert drawn == replace(job, min_tokens=48, timed_parts=True).lengths(200)
    assert (min(drawn), max(drawn)) == (48, 96)


def test_a_case_with_a_task_answers_that_tasks_prompts() -> None:
    tasks = ["chat", "chat", "chat", "code", "code"]
    job = Job({}, 0, [[i] for i in range(5)], None, 8, False, False, tasks)
    assert job.prompts_at(Case(1, 0.0, "chat")) == [[0], [1], [2]]
    assert job.prompts_at(Case(1, 0.0, "code")) == [[3], [4]]
    assert replace(job, prompts_per_request=1).prompts_at(Case(2, 0.0, "chat")) == [[0], [1]]


def test_warm_up_and_measurement_are_of_the_cases_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[list[int]], int]] = []

    def generate(_: Any, prompts: list[list[int]], params: Any, concurrency: int) -> Generation:
        asked.append((prompts, concurrency))
        return Generation([], 1.0, 1, 1)

    monkeypatch.setattr(engine, "generate", generate)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=1))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    tasks = ["chat", "chat", "chat", "code", "code", "code"]
    job = Job({}, 0, [[i] for i in range(6)], None, 8, False, False, tasks)
    llm = SimpleNamespace(get_metrics=lambda: [])

    run = engine.measure(llm, job, Case(2, 0.0, "chat"))

    assert asked == [([[1], [2]], 2), ([[0], [1], [2]], 2)]
    assert (run.concurrency, run.temperature, run.task) == (2, 0.0, "chat")
