# SPDX-License-Identifier: Apache-2.0
"""The recipe's log says whether another run did the same."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from vllm_redrafter.data.dataset import DatasetInfo, write_shard
from vllm_redrafter.data.rows import Row
from vllm_redrafter.data.settings import SamplingSettings

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def log() -> Any:
    spec = spec_from_file_location("recipe_log", RECIPE / "log.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_prompts(folder: Path, num: int, first: str = "prompt 0") -> None:
    texts = [first, *(f"prompt {i}" for i in range(1, num))]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": t}) for t in texts))


def write_shards(folder: Path, num: int) -> None:
    """Shards of two short rows each."""
    folder.mkdir()
    DatasetInfo(
        target="t",
        target_fingerprint="t",
        tokenizer_fingerprint="t",
        template_fingerprint=None,
        prompts_fingerprint="p",
        num_conversations=2 * num,
        shard_size=2,
        vocab_size=99,
        sampling=SamplingSettings(),
    ).save(folder)
    for shard in range(num):
        numbers = (2 * shard, 2 * shard + 1)
        rows = [Row(n, [1, n, 2], [False, True, True]) for n in numbers]
        write_shard(folder, shard, rows)


def test_the_log_of_the_recipe_has_all_of_its_parts() -> None:
    logged = json.loads((RECIPE / "log.json").read_text())
    assert {part: len(values) for part, values in logged.items()} == {
        "prompts": 60,
        "sampled": 8,
        "greedy": 11,
        "greedy-2": 6,
        "losses": 130,
    }


def test_a_run_that_was_stopped_early_agrees_with_the_whole(log: Any, tmp_path: Path) -> None:
    write_prompts(tmp_path, 350)
    whole = log.log_of(tmp_path)
    assert len(whole["prompts"]) == 3
    write_prompts(tmp_path, 210)
    assert log.compare(log.log_of(tmp_path), whole)


def test_another_prompt_is_noticed(
    log: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts(tmp_path, 200)
    whole = log.log_of(tmp_path)
    write_prompts(tmp_path, 200, first="another")
    assert not log.compare(log.log_of(tmp_path), whole)
    assert "prompts: 1 of 2 as in the log, which has 2" in capsys.readouterr().out


def test_shards_are_compared_as_far_as_they_are_finished(log: Any, tmp_path: Path) -> None:
    write_shards(tmp_path / "sampled", 3)
    whole = log.log_of(tmp_path)
    assert len(whole["sampled"]) == 3 == len(set(whole["sampled"]))
    (tmp_path / "sampled" / "shard-00001.parquet").unlink()
    early = log.log_of(tmp_path)
    assert early["sampled"] == whole["sampled"][:1]
    assert log.compare(early, whole)


def test_losses_may_differ_by_rounding_alone(log: Any) -> None:
    expected = {"losses": [2.0, 1.5]}
    assert log.compare({"losses": [2.01]}, expected)
    assert not log.compare({"losses": [2.1]}, expected)
