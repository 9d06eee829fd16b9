# SPDX-License-Identifier: Apache-2.0
"""benchmarks/step_log.py on engines under the interpreter: plain decoding, and ReDrafter's."""

from pathlib import Path

import pytest
import step_log

from redrafter_testing.benchmarks import short_level
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.models.tiny_models import make_drafter, make_small_target


@pytest.mark.engine
@pytest.mark.parametrize("drafts", [False, True])
def test_every_step_has_its_kind_its_rows_and_the_time_of_its_phases(
    drafts: bool, tmp_path: Path
) -> None:
    target = make_small_target(tmp_path / "target", hidden_size=64)
    drafter = make_drafter(tmp_path / "drafter", hidden_size=64)
    config = {"model": str(drafter), "num_speculative_tokens": 4} if drafts else None
    with interpreted_engine(target, speculative_config=config) as llm:
        record, counters = llm.call(short_level.measured, drafts)
    steps = record["steps"]
    assert {step["kind"] for step in steps} == {"prompts", "mixed", "decode"}
    assert sum(step["new"] for step in steps) == 8
    for step in steps:
        host = step["host"]
        assert step["rows"] >= step["new"] + step["decoding"]
        assert 0 < host["sample"] < host["sample_tokens"] < step["period"]
        assert drafts == ("propose" in host)
    assert any(step["nodes"] for step in steps) == drafts
    assert (counters is not None and counters["verifications"] > 0) == drafts
    assert step_log.table([record]).row_count == 3
