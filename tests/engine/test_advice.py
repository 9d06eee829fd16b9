# SPDX-License-Identifier: Apache-2.0
"""What whoever generates data is told of the dtype; no engine starts."""

from types import SimpleNamespace

import pytest
import torch

from vllm_redrafter.cli import data
from vllm_redrafter.data.settings import GenerationSettings
from vllm_redrafter.offline import generation
from vllm_redrafter.offline.generation import OfflineEngine


def test_slow_data_is_not_generated_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's own log is switched off there."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    monkeypatch.setattr(generation, "current_platform", SimpleNamespace(is_cpu=lambda: True))

    def started(dtype: torch.dtype) -> str:
        engine = object.__new__(OfflineEngine)
        model = SimpleNamespace(dtype=dtype)
        engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=model))
        monkeypatch.setattr(generation, "OfflineEngine", lambda target, settings: engine)
        assert data.start_vllm("target", GenerationSettings()) is engine
        return capsys.readouterr().err

    assert "--dtype float32 is faster" in started(torch.bfloat16)
    assert started(torch.float32) == ""
    monkeypatch.setattr(generation, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert started(torch.bfloat16) == ""
