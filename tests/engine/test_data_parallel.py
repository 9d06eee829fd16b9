"""Two engines behind one front end answer as one without speculation does, and both speculate."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from redrafter_testing import process_trees
from redrafter_testing.engines import data_parallel, interpreted_engine

pytestmark = pytest.mark.engine

ENGINES: dict[str, Mapping[str, str]] = {
    "cpu": {},
    "v2": {**interpreted_engine.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_data_parallel_answers_equal_plain(
    engine: str,
    few_tokens_target: Path,
    few_tokens_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
) -> None:
    command = [sys.executable, "-P", data_parallel.__file__, few_tokens_target, few_tokens_drafter]
    environment = {**os.environ, **ENGINES[engine]}
    done = process_trees.run(command, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"answers"'))
    found = json.loads(line)
    assert found["answers"] == few_tokens_plain["greedy"]
    assert found["accepted"].keys() == {"0", "1"}
    assert all(accepted > 0 for accepted in found["accepted"].values())
