# SPDX-License-Identifier: Apache-2.0
"""What the engine that writes training data is started with."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.platforms import current_platform

from vllm_redrafter.data.settings import (
    EngineSettings,
    GenerationSettings,
)
from vllm_redrafter.offline.generation import engine_arguments
from vllm_redrafter.utils.errors import ConfigError

SETTINGS = GenerationSettings(in_flight=3)
GREEDY = replace(SETTINGS, sampling=replace(SETTINGS.sampling, temperature=0.0))


def test_further_arguments_go_to_vllm_and_may_not_contradict_options() -> None:
    further = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    settings = replace(
        GREEDY, engine=EngineSettings(tensor_parallel_size=4, engine_args=json.dumps(further))
    )
    found = engine_arguments("target", settings)
    assert found["tensor_parallel_size"] == 4
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
    engine = EngineSettings(tensor_parallel_size=ranks)
    found = engine_arguments("target", replace(GREEDY, engine=engine))
    assert found["gpu_memory_utilization"] == pytest.approx(expected)
    told = EngineSettings(engine_args=json.dumps({"gpu_memory_utilization": 0.1}))
    assert engine_arguments("target", replace(GREEDY, engine=told))["gpu_memory_utilization"] == 0.1
