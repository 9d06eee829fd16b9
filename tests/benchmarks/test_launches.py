# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of kernels, on Triton's interpreter and with a stopwatch that is not a GPU's.

In a process of its own: the interpreter, once chosen, is chosen for all that this one imports.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import context_matches
import pytest
import torch
from shared_parts import launches
from shared_parts.launches import Timed

CODE = """
import json, sys
from types import SimpleNamespace
import torch
import context_matches, draft_layers, tree_attention

class Gpu:
    device, free_bytes = torch.device("cpu"), 10_000_000
    def in_graph(self, launch):
        launch()
        return 20.0

draft_layers.VOCABULARY = 200
tree_attention.HEADS, tree_attention.HEAD_DIM = {"tiny": (4, 2)}, 64
options = SimpleNamespace(
    batches=[2], contexts=[20, 40_000], nodes=[1, 5], hidden=[32], rows=[4, 8],
    tokens=[20, 50], requests=[3], context_matches=2,
)
for script in (tree_attention, draft_layers, context_matches):
    for timed in script.measured(Gpu(), options):
        print(json.dumps([script.__name__, timed.launch, timed.case, timed.floor_bytes]))
"""


def test_every_kernel_is_launched_at_every_size_beside_what_it_must_read() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(context_matches.__file__).parent),
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    # Bytes of bf16; K and V of 2 heads of 64, queries and output of 4, blocks and bit sets.
    assert [line[1:] for line in found if line[0] == "tree_attention"] == [
        ["tree attention", f"tiny, 2 x 20, nodes {n}", 2 * (512 * (20 + 3 * n) + 4 * (2 + n))]
        for n in (1, 5)
    ]
    square = 2 * 32 * 32
    heads = [(line[1], line[3]) for line in found if line[2] == "H 32, 4 rows"]
    assert heads[:3] == [("cell", 4 * square), ("its product", 4 * square), ("block", square)]
    assert {line[1] for line in found if line[0] == "context_matches"} == set(context_matches.KINDS)


class Gpu:
    name = "a GPU"

    def __init__(self, repeats: int) -> None:
        assert repeats == 100

    def copy_bandwidth(self) -> float:
        return 2000.0

    def describe(self) -> dict[str, str]:
        return {"driver": "none"}


def test_figures_are_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launches, "Gpu", Gpu)
    monkeypatch.setattr(
        context_matches, "measured", lambda *_: [Timed("random", "3 x 20", 4_000_000, 4.0)]
    )
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    output = tmp_path / "out.json"
    context_matches.main(["--device", "cuda", "--output", str(output)])
    # 4 MB take 2 microseconds at 2 TB/s.
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "random" in line)
    assert [cell for cell in line.split() if cell[0].isdigit()][2:] == ["4.0", "2.0", "1000", "50%"]
    record = json.loads(output.read_text())
    assert record["copy_gb_per_s"] == 2000.0
    assert [launch["microseconds"] for launch in record["launches"]] == [4.0]
