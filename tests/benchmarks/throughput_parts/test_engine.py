"""The loop over an engine's steps: what is in flight, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from throughput_parts.engine import Job, generate


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
    engine = FakeEngine()
    llm = SimpleNamespace(llm_engine=engine)

    made = generate(llm, [[i] for i in range(5)], params=None, concurrency=2)

    assert made.outputs == [[i] * 7 for i in range(5)]
    assert engine.most_in_flight == 2
    assert (made.steps, made.request_steps) == (12, 20)
    assert made.seconds > 0


def test_low_concurrency_answers_the_first_of_the_prompts() -> None:
    prompts = [[i] for i in range(12)]

    def job(prompts_per_request: int | None) -> Job:
        return Job({}, 0, prompts, prompts_per_request, 8, False, False)

    assert [len(job(2).prompts_at(level)) for level in (1, 2, 8)] == [2, 4, 12]
    assert job(2).prompts_at(2) == prompts[:4]
    assert job(None).prompts_at(1) == prompts
