"""What a trace says about kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from first_gpu_parts.profiler_trace import busiest, profiler


def write_trace(path: Path, events: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_kernels_come_by_the_time_of_all_their_calls(tmp_path: Path) -> None:
    kernels = [("gemm", 2000), ("attend", 1500), ("attend", 1500)]
    events = [{"cat": "kernel", "name": name, "dur": dur} for name, dur in kernels]
    others = [{"name": "metadata"}, {"cat": "cpu_op", "name": "mm", "dur": 9000}]
    assert busiest([write_trace(tmp_path / "a.json.gz", [*others, *events])]) == [
        {"name": "attend", "calls": 2, "ms": 3.0},
        {"name": "gemm", "calls": 1, "ms": 2.0},
    ]


def test_without_a_kernel_there_is_nothing(tmp_path: Path) -> None:
    assert busiest([]) == []
    assert busiest([write_trace(tmp_path / "a.json.gz", [])]) == []


def test_vllm_knows_the_profiler_s_settings(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.config import ProfilerConfig

    assert ProfilerConfig(**profiler(tmp_path)).torch_profiler_dir == str(tmp_path)
