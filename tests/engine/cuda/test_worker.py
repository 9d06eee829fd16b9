# SPDX-License-Identifier: Apache-2.0
"""What the GPU's worker does besides vLLM's, in a process without a GPU."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec
from vllm.v1.worker.worker_base import WorkerBase

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.forked_engine import Engine
from vllm_redrafter import ConfigError
from vllm_redrafter.engine.cuda import worker
from vllm_redrafter.engine.cuda.worker import TreeWorker

K = 3
STATE = MambaSpec(
    block_size=64,
    shapes=((4, 256), (2, 128)),
    dtypes=(torch.float32, torch.float32),
    num_speculative_blocks=K,
)
ATTENTION = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.float32)
HYBRID: dict[str, KVCacheSpec] = {"0": STATE, "1": ATTENTION, "2": STATE}
NEEDED = 2 * (K + 1) * 4 * (4 * 256 + 2 * 128)


@pytest.mark.engine
def test_the_gpu_s_worker_makes_our_model_runner(oracle: Engine) -> None:
    (made,) = oracle.rpc(inside_worker.made_by_the_gpu_worker)
    assert made == [
        "vllm_redrafter.engine.cuda.runner.GPUTreeModelRunner",
        "redrafter_testing.oracles.oracle_v2.OracleSpeculator",
    ]


class Worker(WorkerBase):
    """vLLM's, with so much memory and such layers."""

    def __init__(self, available: int, specs: dict[str, KVCacheSpec]) -> None:
        self.available, self.specs = available, specs
        self.vllm_config = SimpleNamespace(num_speculative_tokens=K)

    def determine_available_memory(self) -> int:
        return self.available

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.specs


def check(available: int, specs: dict[str, KVCacheSpec]) -> int:
    checked: Any = type("Checked", (TreeWorker, Worker), {"__init__": Worker.__init__})
    return int(checked(available, specs).determine_available_memory())


def test_recurrent_states_are_announced_or_refused_with_the_remedy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "logger", logging.getLogger("states"))
    with caplog.at_level(logging.INFO, "states"):
        assert check(NEEDED, HYBRID) == NEEDED
        assert check(7, {"0": ATTENTION}) == 7
    (said,) = caplog.messages
    assert said.startswith("With num_speculative_tokens=3 a request keeps 4 recurrent states")
    with pytest.raises(ConfigError, match=r"=3 a request keeps 4 recurrent states .*: lower num_"):
        check(NEEDED - 1, HYBRID)
