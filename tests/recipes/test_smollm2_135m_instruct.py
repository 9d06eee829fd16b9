# SPDX-License-Identifier: Apache-2.0
"""The recipe's log says whether another run did the same."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

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


def test_a_run_that_was_stopped_early_agrees_with_the_whole_and_another_does_not(
    log: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts(tmp_path, 350)
    whole = log.log_of(tmp_path)
    assert len(whole["prompts"]) == 3
    write_prompts(tmp_path, 210)
    assert log.compare(log.log_of(tmp_path), whole)
    write_prompts(tmp_path, 200, first="another")
    assert not log.compare(log.log_of(tmp_path), whole)
    assert "prompts: 1 of 2 as in the log, which has 3" in capsys.readouterr().out


def test_losses_may_differ_by_rounding_alone(log: Any) -> None:
    expected = {"losses": [2.0, 1.5]}
    assert log.compare({"losses": [2.01]}, expected)
    assert not log.compare({"losses": [2.1]}, expected)
