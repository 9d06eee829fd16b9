"""The summary has every step, its key figures, and the end of the log of what failed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from draft_layers import Layer
from first_gpu_parts import summary
from shared_parts import machine
from shared_parts.timing import Timing
from step_cost_parts.report import PARTS, Cost, as_json
from tree_attention_parts.report import AttentionResult, Check, Missing, judge

CASE = AttentionResult(
    heads="llama-3-8b",
    batch=8,
    context=4096,
    nodes="32",
    rows=256,
    leaves=130,
    floor_bytes=360_000_000,
    tree=Timing([100.0, 90.0, 300.0]),
    launched=Timing([150.0]),
    one_node=Timing([95.0]),
    flex=Timing([200.0]),
    beams=Missing("failed: RuntimeError"),
)
CHECKS = [asdict(Check("tree_attention", "bf16", 0.001, 0.02))]
MEASURED: dict[str, dict[str, Any]] = {
    "environment": {
        **machine.describe("a GPU"),
        "device": {
            "name": "a GPU",
            "capability": "9.0",
            "memory_gib": 139.8,
            "multiprocessors": 132,
            "l2_mib": 50.0,
            "cuda": "13.0",
            "driver": "580.1",
        },
        "missing": ["the package is not installed"],
    },
    "parity": {
        "engines": {
            "plain": {"checks": "error", "accepted": None, "agreement": {}},
            "fixed": {
                "checks": "warn",
                "accepted": 120,
                "agreement": {
                    "greedy": {
                        "equal": 7,
                        "of": 8,
                        "differences": [{"request": 3, "position": 17, "gap": 0.0004}],
                    }
                },
            },
            "adaptive": {"checks": None, "accepted": None, "agreement": {}},
        }
    },
    "tree_attention": {
        "checks": [*CHECKS, asdict(Check("tree_attention", "fp32", 1.5, 0.02))],
        "copy_gbps": 4000.0,
        "timings": {"attention": [asdict(CASE)], "steps": []},
        "goals": [asdict(verdict) for verdict in judge([CASE], [], 4000.0)],
    },
    "draft_layers": {
        "copy_tb_per_s": 3.0,
        "layers": [
            asdict(Layer(name, 4096, 4, 2**20, took, tile, took != 50.0))
            for name, took, tile in (
                ("cell", 99.0, {"columns": 16}),
                ("its product", 49.0, None),
                ("block", 30.0, None),
                ("its product", 20.0, None),
                ("cell", 50.0, {"columns": 8, "num_warps": 8}),
                ("cell", 98.0, {"columns": 16, "num_warps": 4}),
            )
        ],
    },
    "kernel_resources": {
        "kernels": [
            {"name": "_attend_part", "case": "bf16", "stack": 0, "blocks": 2},
            {"name": "_attend_part", "case": "fp32", "stack": 16, "blocks": 0},
        ]
    },
    "step_cost_llama_7b": {
        "steps": as_json(
            [
                Cost("llama-7b", nodes, 8, 512, step, dict.fromkeys(PARTS, 0.5), 50)
                for nodes, step in ((0, 8.0), (32, 10.0))
            ]
        )
    },
    "throughput": {
        "rows": [
            {
                "task": task,
                "temperature": 0.0,
                "concurrency": 4,
                "method": "adaptive",
                "shape": "4x5:12",
                "tokens_per_second": [1234.0, 1200.0, 1300.0],
                "ratio": [1.87, 1.8, 1.9],
                "tokens_per_step": 2.5,
                "identical": 31,
                "requests": 32,
            }
            for task in ("chat", None)
        ]
    },
    "profiler_trace": {
        "traces": ["a.pt.trace.json.gz"],
        "total_ms": 40.0,
        "kernels": [{"name": "gemm", "calls": 7, "ms": 30.0}],
    },
}
EXPECTED: dict[str, list[str]] = {
    "environment": ["a GPU, compute capability 9.0", "python 3", "the package is not installed"],
    "parity": [
        "- plain: nothing compiled or waited",
        "- fixed: compiled or waited",
        "- fixed, greedy: 7 of 8 answers are equal",
        "- request 3 from token 17 on; gap 4.0e-04 nats",
        "- fixed: 120 drafted tokens accepted",
        "- adaptive: failed",
    ],
    "tree_attention": [
        "WRONG: tree_attention, fp32: error 1.5",
        "copy bandwidth 4000 GB/s",
        "at least 80 % of the copy bandwidth (context ≥ 4k, batch ≥ 8): met, worst 90%",
        "llama-3-8b, 8 × 4096, nodes 32: of copy 0.90, × one node 1.05, flex ÷ tree 2.00, "
        "beams apart ÷ tree –",
    ],
    "draft_layers": [
        "copy bandwidth 3.00 TB/s",
        "H 4096, 4 rows: cell 99.0 µs, its product 49.0 µs, block 30.0 µs, its product 20.0 µs",
        "fastest of 2 tiles: 50.0 µs, columns 8, num_warps 8",
    ],
    "kernel_resources": [
        "2 kernels compiled",
        "_attend_part, fp32: spills 16 bytes",
        "_attend_part, fp32: does not fit",
    ],
    "step_cost_llama_7b": [
        "llama-7b, 8 × 512: a plain step 8.00 ms",
        "llama-7b, 8 × 512, K 32: 10.00 ms, 1.25 × plain (draft 0.50",
    ],
    "throughput": [
        "temperature 0, 4 in flight, adaptive 4x5:12: 1234 tokens/s, 1.87 × plain, "
        "2.50 tokens/step, 31 of 32 equal"
    ],
    "profiler_trace": ["`profiler_trace/`: a.pt.trace.json.gz", "75% 30.00 ms, 7 calls: `gemm`"],
}


def write_state(out: Path, name: str, status: str, code: int) -> None:
    (out / f"{name}.state").write_text(
        f"status: {status}\nexit: {code}\nseconds: 12\nlimit: 60\ncommit: 0123456789ab\n"
        "command: python a.py --output b\n"
    )


def summarised(out: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["summary", str(out), *names])
    summary.main()
    return (out / "summary.md").read_text()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_step_s_key_figures_are_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path, name, "done", 0)
    (tmp_path / f"{name}.json").write_text(json.dumps(MEASURED[name]))
    text = summarised(tmp_path, [name], monkeypatch)
    assert f"| {name} | done | 12 | 60 | 0123456789ab |" in text
    assert not [line for line in EXPECTED[name] if line not in text], text
    assert "None" not in text


def test_throughput_s_totals_alone_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path, "throughput", "done", 0)
    (tmp_path / "throughput.json").write_text(json.dumps(MEASURED["throughput"]))
    assert summarised(tmp_path, ["throughput"], monkeypatch).count("tokens/s,") == 1


def test_tests_are_counted_and_those_that_failed_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path, "kernel_tests", "failed", 1)
    (tmp_path / "kernel_tests.log").write_text("\n".join(f"line {i}" for i in range(40)))
    (tmp_path / "kernel_tests.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="m">t</failure></testcase>'
        '<testcase classname="a" name="left"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    text = summarised(tmp_path, ["kernel_tests", "parity"], monkeypatch)
    assert "| kernel_tests | failed (exit 1) | 12 |" in text
    assert "- 1 passed, 1 failed, 1 skipped\n- failed: `a::bad`" in text
    assert "line 39" in text and "line 24\n" not in text
    assert "| parity | not run |" in text and "## parity" not in text


def test_figures_that_were_cut_off_do_not_hide_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tree_attention", "environment"):
        write_state(tmp_path, name, "timed out", 124)
    (tmp_path / "tree_attention.json").write_text('{"checks": [')
    (tmp_path / "environment.json").write_text(json.dumps(MEASURED["environment"]))
    text = summarised(tmp_path, ["environment", "tree_attention"], monkeypatch)
    assert "compute capability 9.0" in text
    assert "## tree_attention (timed out)\n\n- its figures cannot be read: JSONDecodeError" in text


def test_a_log_without_a_state_is_one_of_a_step_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parity.log").write_text("so far\n")
    text = summarised(tmp_path, ["parity"], monkeypatch)
    assert "| parity | interrupted |" in text and "so far" in text
