# SPDX-License-Identifier: Apache-2.0
"""What recurrent states take is said, and more of them than there is room for are refused."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec
from vllm.v1.worker.worker_base import WorkerBase

from vllm_redrafter import ConfigError
from vllm_redrafter.engine.cuda import state_memory
from vllm_redrafter.engine.cuda.state_memory import StateMemoryCheck, state_bytes

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
    checked: Any = type("Checked", (StateMemoryCheck, Worker), {"__init__": Worker.__init__})
    return int(checked(available, specs).determine_available_memory())


def test_a_request_keeps_a_state_for_every_row_of_a_verification() -> None:
    assert state_bytes(HYBRID) == NEEDED
    assert state_bytes({"0": ATTENTION}) == 0


def test_what_fits_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(state_memory, "logger", logging.getLogger("states"))
    with caplog.at_level(logging.INFO, "states"):
        assert check(NEEDED, HYBRID) == NEEDED
        assert check(7, {"0": ATTENTION}) == 7
    (said,) = caplog.messages
    assert said.startswith("With num_speculative_tokens=3 a request keeps 4 recurrent states")


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"=3 a request keeps 4 recurrent states .*: lower num_"):
        check(NEEDED - 1, HYBRID)
