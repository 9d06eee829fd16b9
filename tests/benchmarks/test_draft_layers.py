# SPDX-License-Identifier: Apache-2.0
"""benchmarks/draft_layers.py on Triton's interpreter, with a made-up time.

In a process of its own: the interpreter, once chosen, is chosen for all that this one imports.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import throughput

CODE = """
import json
from types import SimpleNamespace
import torch
import draft_layers

class Gpu:
    device = torch.device("cpu")
    def in_graph(self, launch):
        launch()
        return 20.0

draft_layers.VOCABULARY = 200
for timed in draft_layers.measured(Gpu(), SimpleNamespace(hidden=[32], rows=[4, 8])):
    print(json.dumps([timed.launch, timed.case, timed.floor_bytes]))
"""


def test_every_kernel_is_launched_at_every_size_beside_what_it_must_read() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(throughput.__file__).parent),
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
    square = 2 * 32 * 32
    heads = [(launch, read) for launch, case, read in found if case == "H 32, 4 rows"]
    assert heads[:3] == [("cell", 4 * square), ("its product", 4 * square), ("block", square)]
    assert {launch for launch, *_ in found} >= {"candidates", "gathered", "ranked"}
