# SPDX-License-Identifier: Apache-2.0
"""vLLM's own means for several machines, here two groups of processes: output equals plain's."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import front_end, interpreted_engine
from redrafter_testing.engines.server import free_port
from redrafter_testing.requests import few_tokens

pytestmark = pytest.mark.engine

HERE = "127.0.0.1"
V2 = {**interpreted_engine.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
SAMPLINGS = tuple(few_tokens.SAMPLING)


def test_two_ranks_on_two_nodes_answer_as_plain_on_model_runner_v2(
    few_tokens_target: Path,
    few_tokens_fused_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
) -> None:
    models = few_tokens_target, few_tokens_fused_drafter
    shared: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "master_addr": HERE,
        "master_port": free_port(),
    }
    with front_end.headless(V2, *models, node_rank=1, **shared):
        found = front_end.answers_of(V2, *models, SAMPLINGS, 3, node_rank=0, **shared)
    assert found["answers"] == {s: few_tokens_plain[s][:3] for s in SAMPLINGS}
    assert found["accepted"]["0"] > 0 and found["verified"]["0"] > 0


def test_data_parallel_engines_on_two_nodes_answer_as_plain_on_a_cpu(
    few_tokens_target: Path,
    few_tokens_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
) -> None:
    models = few_tokens_target, few_tokens_drafter
    shared: dict[str, Any] = {
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_address": HERE,
        "data_parallel_rpc_port": free_port(),
    }
    with front_end.headless({}, *models, data_parallel_start_rank=1, **shared):
        found = front_end.answers_of({}, *models, **shared)
    assert found["answers"]["greedy"] == few_tokens_plain["greedy"]
    assert found["accepted"].keys() == {"0", "1"} and all(found["accepted"].values())
