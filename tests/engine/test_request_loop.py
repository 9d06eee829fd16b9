"""Many requests through an engine: how many at a time, and what comes back; no vLLM."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from vllm_redrafter.engine.request_loop import EngineRequest, run_requests


class Engine:
    """A request takes as many steps as its prompt has tokens."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.seen: list[tuple[str, ...]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.left[name] = len(prompt["prompt_token_ids"])

    def step(self) -> list[Any]:
        self.seen.append(tuple(self.left))
        self.left = {name: left - 1 for name, left in self.left.items()}
        outputs = [
            SimpleNamespace(request_id=name, finished=not left) for name, left in self.left.items()
        ]
        self.left = {name: left for name, left in self.left.items() if left}
        return outputs


def request(name: str, steps: int) -> EngineRequest:
    return EngineRequest(name, range(steps), params=None)  # type: ignore[arg-type]


def test_a_request_enters_when_another_has_finished() -> None:
    engine = Engine()
    waiting = iter([request("a", 1), request("b", 3), request("c", 1), request("d", 2)])
    steps = list(run_requests(engine, lambda: next(waiting, None), in_flight=2))

    assert engine.seen == [("a", "b"), ("b", "c"), ("b", "d"), ("d",)]
    assert [tuple(output.request_id for output in step) for step in steps] == engine.seen


def test_what_an_output_brings_about_is_asked_for_in_the_next_step() -> None:
    """A conversation's next turn follows from the answer to the last one."""
    engine, waiting = Engine(), deque([request("first", 1), request("other", 3)])
    for step in run_requests(engine, lambda: waiting.popleft() if waiting else None, in_flight=4):
        if step[0].request_id == "first":
            waiting.append(request("second", 1))

    assert engine.seen == [("first", "other"), ("other", "second"), ("other",)]


def test_nothing_to_do_is_no_step() -> None:
    engine = Engine()
    assert list(run_requests(engine, lambda: None, in_flight=2)) == []
    assert engine.seen == []
