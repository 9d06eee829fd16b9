# SPDX-License-Identifier: Apache-2.0
"""What vLLM is started with, the requests it has at a time, and how a failing start is reported."""

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from vllm_redrafter.data.settings import EngineSettings, GenerationSettings, SamplingSettings
from vllm_redrafter.offline.generation import engine_arguments
from vllm_redrafter.offline.llm import EngineRequest, run_requests, start_of
from vllm_redrafter.utils.errors import ConfigError


class Engine:
    """A request takes as many steps as its prompt has tokens."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.seen: list[list[str]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.left[name] = len(prompt["prompt_token_ids"])

    def step(self) -> list[Any]:
        running, self.left = self.left, {n: left - 1 for n, left in self.left.items() if left > 1}
        self.seen.append([*running])
        return [SimpleNamespace(request_id=n, finished=n not in self.left) for n in running]


def request(name: str, steps: int) -> EngineRequest:
    return EngineRequest(name, range(steps), params=None)  # type: ignore[arg-type]


def test_a_request_enters_when_another_has_finished_and_what_follows_an_output_next() -> None:
    """A conversation's next turn follows from the answer to the last one."""
    engine = Engine()
    waiting = deque([request("a", 1), request("b", 3), request("c", 1), request("d", 2)])
    steps = []
    for step in run_requests(engine, lambda: waiting.popleft() if waiting else None, in_flight=2):
        steps.append([output.request_id for output in step])
        if step[-1].request_id == "d":
            waiting.append(request("e", 1))

    assert steps == engine.seen == [["a", "b"], ["b", "c"], ["b", "d"], ["d", "e"]]


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (Exception("worker"), ConfigError, "cannot start with target 'here': worker"),
        (RuntimeError("core"), ConfigError, "cannot start with target 'here': core"),
        (TypeError("a bug"), TypeError, "^a bug"),
    ],
)
def test_a_start_that_fails_names_the_target_and_a_bug_keeps_its_name(
    error: Exception, expected: type[Exception], message: str
) -> None:
    with pytest.raises(expected, match=message), start_of("here"):
        raise error


def test_a_target_of_which_another_ones_weights_would_be_loaded_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run[1]"
    folder.mkdir()
    refusal = r"are a pattern where .* rename the folder, or give a link"
    with pytest.raises(ConfigError, match=refusal), start_of(str(folder)):
        pass


def arguments(**engine: Any) -> dict[str, Any]:
    """With greedy answers, for which nothing is read of the target."""
    greedy = SamplingSettings(temperature=0.0)
    return engine_arguments("target", GenerationSettings(greedy, engine=EngineSettings(**engine)))


def test_further_arguments_go_to_vllm_and_may_not_contradict_options() -> None:
    further = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    found = arguments(tensor_parallel_size=4, engine_args=json.dumps(further))
    assert found["tensor_parallel_size"] == 4
    assert further.items() <= found.items()
    for name in ("dtype", "max_num_seqs", "tensor_parallel_size", "model"):
        with pytest.raises(ConfigError, match=f"--engine-args: {name}: the command decides"):
            arguments(engine_args=json.dumps({name: 1}))


@pytest.mark.parametrize(
    ("free", "ranks", "expected"), [(0.5, 1, 0.4), (0.5, 2, 0.2), (1.0, 1, 0.8), (3.0, 1, 0.92)]
)
def test_an_engine_on_a_cpu_asks_for_no_more_memory_than_is_free(
    free: float, ranks: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above all of it: a container, whose limit is less than the machine has free."""
    total = current_platform.get_device_total_memory()
    memory = SimpleNamespace(available=int(free * total))
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    found = arguments(tensor_parallel_size=ranks)
    assert found["gpu_memory_utilization"] == pytest.approx(expected)
    assert arguments(engine_args='{"gpu_memory_utilization": 0.1}')["gpu_memory_utilization"] == 0.1
