# SPDX-License-Identifier: Apache-2.0
"""Several engines and several nodes behind one front end answer as plain vLLM, and are counted."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import front_end, interpreted_engine
from redrafter_testing.engines.ray_cluster import ray_cluster
from redrafter_testing.engines.server import free_port
from redrafter_testing.models.families import MIXTRAL
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.few_tokens import Answers

pytestmark = pytest.mark.engine

V2 = {**interpreted_engine.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
SAMPLINGS = tuple(few_tokens.SAMPLING)


def test_two_engines_with_half_of_the_experts_each_on_model_runner_v2(
    tmp_path: Path, few_tokens_drafter: Path
) -> None:
    """They step together, one that has nothing to do as well."""
    target = MIXTRAL.make(tmp_path / "target")
    more: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    found = front_end.answers_of(V2, target, few_tokens_drafter, **more)
    with interpreted_engine.interpreted_engine(target) as plain:
        expected = plain.tokens(few_tokens.requests("greedy"))
    assert found["answers"]["greedy"] == expected
    assert found["accepted"].keys() == {"0", "1"} and all(found["accepted"].values())


def test_two_engines_on_two_nodes_on_cpus(
    few_tokens_target: Path, few_tokens_drafter: Path, few_tokens_plain: Answers
) -> None:
    models = few_tokens_target, few_tokens_drafter
    shared: dict[str, Any] = {
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_address": "127.0.0.1",
        "data_parallel_rpc_port": free_port(),
    }
    with front_end.headless({}, *models, data_parallel_start_rank=1, **shared):
        found = front_end.answers_of({}, *models, **shared)
    assert found["answers"]["greedy"] == few_tokens_plain["greedy"]
    assert found["accepted"].keys() == {"0", "1"} and all(found["accepted"].values())


def test_two_ranks_of_ray_on_two_nodes_on_model_runner_v2(
    few_tokens_target: Path, few_tokens_fused_drafter: Path, few_tokens_plain: Answers
) -> None:
    with ray_cluster(V2, 1, 1) as environment:
        found = front_end.answers_of(
            environment,
            few_tokens_target,
            few_tokens_fused_drafter,
            SAMPLINGS,
            count=3,
            tensor_parallel_size=2,
            distributed_executor_backend="ray",
        )
    assert found["answers"] == {s: few_tokens_plain[s][:3] for s in SAMPLINGS}
    assert found["accepted"]["0"] > 0 and found["verified"]["0"] > 0
