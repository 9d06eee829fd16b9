# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of kernels on Triton's interpreter, with a made-up time.

In a process of its own: the interpreter, once chosen, is chosen for all that this one imports.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import context_matches

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
