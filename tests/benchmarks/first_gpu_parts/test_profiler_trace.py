"""What vLLM's profiler is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from first_gpu_parts.profiler_trace import profiler


def test_vllm_knows_the_profiler_s_settings(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.config import ProfilerConfig

    assert ProfilerConfig(**profiler(tmp_path)).torch_profiler_dir == str(tmp_path)
