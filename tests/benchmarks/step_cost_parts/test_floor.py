"""What drafts read and launch, of heads so small that it can be counted by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import step_cost

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from dataclasses import asdict
from step_cost_parts.floor import floors
from vllm_redrafter.tree.policy import SearchShape
found = floors(100, 16, SearchShape(2, 3), 8, None)
print(json.dumps({each.head: asdict(each) for each in found}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """In a process of its own, whose kernels are not interpreted."""
    import json
    import os

    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(Path(step_cost.__file__).parent)]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    counted: dict[str, Any] = json.loads(done.stdout)
    return counted


H, V, K, C, BF16 = 16, 100, 4, 8, 2
CELL = 2 * H * (2 * H + 1)


def test_a_gated_head_reads_all_of_it_at_every_level(found: dict[str, Any]) -> None:
    parts = {"V": V * H, "cell": CELL, "scale": H}
    assert found["gated"]["parts"] == {name: 3 * BF16 * n for name, n in parts.items()}
    assert found["gated"]["launches"] == 6 * 3


def test_candidates_are_read_in_the_place_of_the_vocabulary(found: dict[str, Any]) -> None:
    parts = found["gated, selector"]["parts"]
    assert parts == {
        "V": BF16 * V * H,
        "cell": 3 * BF16 * CELL,
        "scale": 3 * BF16 * H,
        "selector": 2 * BF16 * (K * H + K + H * K),
        "gathered rows": 2 * BF16 * C * H,
    }
