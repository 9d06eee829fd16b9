"""Training data by several engines behind one front end, which stands in here for vLLM's."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_redrafter.data.generation_settings import (
    EngineSettings,
    GenerationSettings,
    PromptSettings,
)
from vllm_redrafter.data.turns import OpenTurn
from vllm_redrafter.engine import offline_parallel
from vllm_redrafter.engine.offline import engine_arguments
from vllm_redrafter.engine.offline_parallel import DataParallelEngine
from vllm_redrafter.utils.errors import ConfigError

SETTINGS = GenerationSettings(
    in_flight=3, engine=EngineSettings(data_parallel_size=2, engine_args='{"block_size": 32}')
)
GREEDY = replace(SETTINGS, sampling=replace(SETTINGS.sampling, temperature=0.0))


class FakeLLM:
    """Repeats prompts, the longer ones later."""

    last: FakeLLM

    def __init__(self, arguments: Any) -> None:
        FakeLLM.last = self
        self.arguments, self.loop = arguments, asyncio.get_running_loop()
        self.model_config = SimpleNamespace(max_model_len=64)
        self.ended = False

    @classmethod
    def from_engine_args(cls, arguments: Any) -> FakeLLM:
        return cls(arguments)

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        assert asyncio.get_running_loop() is self.loop
        tokens = prompt["prompt_token_ids"]
        await asyncio.sleep(0.01 * len(tokens))
        if 99 in tokens:
            raise EngineDeadError
        written = SimpleNamespace(token_ids=[*tokens, params.seed], finish_reason="stop")
        yield SimpleNamespace(outputs=[written])

    def shutdown(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_parallel, "AsyncLLM", FakeLLM)


def test_each_turn_is_answered_once_and_those_of_added_ones_too() -> None:
    engine = DataParallelEngine("target", GREEDY)
    assert (engine.in_flight, engine.max_model_len, engine.tokens_per_step()) == (6, 64, None)
    waiting = deque(OpenTurn(i, 0, [5] * (4 - i), 8, seed=i) for i in range(3))
    found = []
    for answer in engine.answers(waiting):
        found.append((answer.conversation, answer.tokens[-1], answer.ended))
        if len(found) == 1:
            waiting.append(OpenTurn(3, 0, [6], 8, seed=3))
    assert sorted(found) == [(i, i, True) for i in range(4)]
    llm = FakeLLM.last
    assert llm.arguments.data_parallel_size == 2 and llm.arguments.block_size == 32
    engine.close()
    assert llm.ended


def test_an_engine_that_dies_ends_the_run() -> None:
    engine = DataParallelEngine("target", GREEDY)
    with pytest.raises(ConfigError, match=r"vLLM failed while generating: .*Finished shards are"):
        list(engine.answers(deque([OpenTurn(0, 0, [99], 8, 0), OpenTurn(1, 0, [5] * 50, 8, 0)])))
    engine.close()


def test_further_arguments_go_to_vllm_and_may_not_contradict_options() -> None:
    further = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    settings = replace(
        GREEDY, engine=EngineSettings(tensor_parallel_size=4, engine_args=json.dumps(further))
    )
    found = engine_arguments("target", settings)
    assert found["tensor_parallel_size"] == 4 and found["data_parallel_size"] == 1
    assert further.items() <= found.items()
    for name in ("dtype", "max_num_seqs", "tensor_parallel_size", "model"):
        twice = replace(GREEDY, engine=EngineSettings(engine_args=json.dumps({name: 1})))
        with pytest.raises(ConfigError, match=f"--engine-args: {name}: the command has an arg"):
            engine_arguments("target", twice)


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
    engine = EngineSettings(data_parallel_size=ranks)
    found = engine_arguments("target", replace(GREEDY, engine=engine))
    assert found["gpu_memory_utilization"] == pytest.approx(expected)
    told = EngineSettings(engine_args=json.dumps({"gpu_memory_utilization": 0.1}))
    assert engine_arguments("target", replace(GREEDY, engine=told))["gpu_memory_utilization"] == 0.1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine_args": "{"}, "no JSON"),
        ({"engine_args": "[1]"}, "give a JSON object"),
        ({"tensor_parallel_size": 0}, "engine: tensor_parallel_size must be at least 1, got 0"),
        ({"data_parallel_size": 0}, "engine: data_parallel_size must be at least 1, got 0"),
    ],
)
def test_what_is_no_setting_of_an_engine_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSettings(**values)


def test_how_the_engine_runs_is_no_part_of_what_prompts_are_made_with() -> None:
    apart = PromptSettings(engine=EngineSettings(tensor_parallel_size=2))
    assert apart.recipe() == PromptSettings().recipe()
