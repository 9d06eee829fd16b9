# SPDX-License-Identifier: Apache-2.0
"""What requests would wait for, and the budget would learn from, is done at start-up."""

from pathlib import Path

import pytest

from redrafter_testing.engines.compiled_loops import compiled_loops
from redrafter_testing.engines.cpu_engine import cpu_engine, measure_briefly
from redrafter_testing.engines.forced_budget import RandomPlanner, force
from redrafter_testing.requests import workloads

pytestmark = pytest.mark.engine

SETTINGS = {"num_speculative_tokens": 8, "beam_width": 3, "beam_length": 3, "context_matches": 2}


def test_no_loop_is_compiled_for_a_request(target: Path, drafter: Path) -> None:
    config = {"model": str(drafter), **SETTINGS}
    with cpu_engine(target, setup=measure_briefly, speculative_config=config) as llm:
        llm.rpc(force, RandomPlanner)
        (before,) = llm.rpc(compiled_loops)
        llm.run(workloads.MIXED)
        (after,) = llm.rpc(compiled_loops)
        matched = llm.rpc("redrafter_stats")[0]["matched_tokens"]
    assert matched > 0
    assert {name for name, types in after.items() if types != before[name]} == set()
