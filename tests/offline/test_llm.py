# SPDX-License-Identifier: Apache-2.0
"""How many requests an engine has at a time, and how a vLLM that cannot start says so."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_redrafter.offline.llm import EngineRequest, run_requests, start_of
from vllm_redrafter.utils.errors import ConfigError


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


@pytest.mark.parametrize("error", [Exception("worker"), ValueError("memory"), RuntimeError("core")])
def test_vllm_not_starting_is_told_with_the_target(error: Exception) -> None:
    with (
        pytest.raises(ConfigError, match=f"cannot start with target 'here': {error}"),
        start_of("here"),
    ):
        raise error


def test_a_bug_while_vllm_starts_keeps_its_own_name() -> None:
    with pytest.raises(TypeError, match="a bug"), start_of("here"):
        raise TypeError("a bug")


@pytest.mark.parametrize("name", ["run[1]", "what?", "lr*"])
def test_a_target_of_which_another_ones_weights_would_be_loaded_is_refused(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    refusal = r"are a pattern where .* rename the folder, or give a link"
    with pytest.raises(ConfigError, match=refusal), start_of(str(tmp_path / name)):
        pass
    (tmp_path / "link").symlink_to(tmp_path / name)
    with start_of(str(tmp_path / "link")):
        pass
