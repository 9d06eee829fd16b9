"""What each engine is asked to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import step_cost
from step_cost_parts.jobs import SHAPES, engine_arguments, jobs


def test_each_target_and_k_is_a_job_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {**SHAPES["llama-7b"], "hidden_size": 32, "vocab_size": 64}
    monkeypatch.setitem(SHAPES, "llama-7b", tiny)
    arguments = ["--targets", "llama-7b", "--nodes", "8", "32", "--batches", "1", "8"]
    options = step_cost.parser().parse_args([*arguments, "--contexts", "512", "--beams", "4x3"])
    made = jobs(options, tmp_path)
    assert [job.nodes for job in made] == [0, 8, 32]
    assert made[0].cases == [(1, 512), (8, 512)]
    plain, speculative = (engine_arguments(made[i]) for i in (0, 2))
    assert "speculative_config" not in plain
    assert speculative["speculative_config"]["num_speculative_tokens"] == 32
    assert speculative["speculative_config"]["beam_width"] == 4
    assert speculative["speculative_config"]["adaptive"] is False
    schedule = speculative["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert schedule == [[1, 1, 32]]
    graphs = speculative["compilation_config"]
    assert graphs["cudagraph_capture_sizes"] == [1, 8, 33, 264]
    assert speculative["max_model_len"] > 512 + 100
    assert json.loads((Path(made[0].folder) / "config.json").read_text())["hidden_size"] == 32
    assert (Path(made[0].drafter) / "model.safetensors").exists()
