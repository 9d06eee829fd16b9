"""A table and a file of a GPU's steps, by kind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import trace_steps


def write_trace(path: Path, events: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def step(begin: float, busy: float, name: str) -> list[dict[str, Any]]:
    """A pass, in which a kernel runs, and another kernel after it."""
    return [
        {"cat": "gpu_user_annotation", "name": name, "ts": begin, "dur": busy},
        {"cat": "kernel", "name": "[gemm]", "ts": begin, "dur": busy},
        {"cat": "kernel", "name": "draft", "ts": begin + busy, "dur": 100},
    ]


def test_steps_of_a_kind_are_a_line_of_medians(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoding = "execute_context_0(0)_generation_1(13)"
    trace = write_trace(
        tmp_path / "a.json.gz",
        step(0, 7000, "execute_context_1(63)_generation_0(0)")
        + step(20000, 6000, decoding)
        + step(28000, 6200, decoding)
        + step(38000, 9000, decoding)
        + [{"cat": "cpu_op", "name": "vllm::attend", "ts": 0, "dur": 90}],
    )
    output = tmp_path / "steps.json"
    trace_steps.main([str(trace), "--kernels", "1", "--output", str(output)])
    (found,) = json.loads(output.read_text())["traces"]
    assert found == {
        "trace": "a.json.gz",
        "steps": [
            {"steps": 1, "prompts": 1, "prompt_rows": 63, "decoding": 0, "decoding_rows": 0}
            | {"period_ms": 20.0, "busy_ms": 7.1, "forward_ms": 7.0},
            {"steps": 3, "prompts": 0, "prompt_rows": 0, "decoding": 1, "decoding_rows": 13}
            | {"period_ms": 9.0, "busy_ms": 6.3, "forward_ms": 6.2},
        ],
        "kernels": [{"name": "[gemm]", "calls": 4, "ms": 28.2}],
        "host": [{"name": "vllm::attend", "calls": 1, "median_us": 90.0}],
    }
    printed = capsys.readouterr().out
    assert "1 (13)" in printed
    assert "7050.0 µs  [gemm]" in printed
    assert "90.0 µs  vllm::attend" in printed


@pytest.mark.parametrize(
    "content",
    [None, b"no trace", gzip.compress(b"no JSON"), gzip.compress(b'{"traceEvents": []}')],
    ids=["no file", "text", "no JSON", "no steps"],  # compressed bytes have a time in them
)
def test_what_is_no_trace_of_steps_is_refused(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit):
        trace_steps.main([str(path)])
    assert f"{path}: " in capsys.readouterr().err
