# SPDX-License-Identifier: Apache-2.0
"""benchmarks/kernels.py on Triton's interpreter, with a made-up time.

In a process of its own: the interpreter, once chosen, is chosen for all that this one imports.
"""

import json
import os
import sys
from pathlib import Path

import throughput

from redrafter_testing import process_trees

CODE = """
import json
from types import SimpleNamespace
import torch
import kernels

class Gpu:
    device = torch.device("cpu")
    def in_graph(self, launch):
        launch()
        return 20.0

kernels.VOCABULARY = 200
sizes = dict(hidden=[32], rows=[4, 8], requests=[2], contexts=[20], nodes=[5])
for timed in kernels.measured(Gpu(), SimpleNamespace(**sizes)):
    print(json.dumps([timed.launch, timed.case, timed.floor_bytes]))
"""


def test_every_kernel_is_launched_at_every_size_beside_what_it_must_read() -> None:
    variables = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables["PYTHONPATH"] = str(Path(throughput.__file__).parent)
    command = [sys.executable, "-P", "-c", CODE]
    printed = process_trees.output_of(command, env=os.environ | variables)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    square = 2 * 32 * 32
    heads = [(launch, read) for launch, case, read in found if case == "H 32, 4 rows"]
    assert heads[:3] == [("cell", 4 * square), ("its product", 4 * square), ("block", square)]
    assert dict(heads)["lstm"] == 4 * (1 + 4 + 1 + 2) * 2 * 32
    assert {launch for launch, *_ in found} >= {"candidates", "gathered", "ranked", "admitted"}
    # K and V of 20 + 5 tokens and 8 heads, queries and output of 5 and 32; states read and written.
    steps = {launch: (case, read) for launch, case, read in found}
    assert steps["attention"] == ("2 x 20, nodes 5", 2 * 128 * 2 * (25 * 2 * 8 + 5 * 2 * 32))
    assert (steps["entered"][1], steps["found"][1]) == (2 * 256 * 36, 2 * 32 * 44)
    assert steps["loaded"] == ("2 requests, H 32", 2 * 2 * (32 * 2 + 8 + 8 + 4 + 4))
