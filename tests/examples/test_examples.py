# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say, on tiny models.

bigram_head.py: tests/engine/test_heads.py; ray_workers.py: tests/offline/test_generation.py.
"""

import json
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from redrafter_testing import process_trees
from redrafter_testing.models.reciting_target import ANSWERS

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: object, cwd: Path, **environment: str) -> str:
    """What an example prints."""
    command, variables = [sys.executable, "-P", EXAMPLES / name, *arguments], {"COLUMNS": "200"}
    return process_trees.output_of(command, env=os.environ | environment | variables, cwd=cwd)


def test_examples_are_short_and_say_how_to_run_them() -> None:
    for path in EXAMPLES.glob("*.py"):
        source = path.read_text()
        assert f"\n    python examples/{path.name} " in source
        assert len(source.splitlines()) < 80


def test_own_tree_policy_compares_two_policies(
    reciting_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reciting_pair[0])
    asked = ([{"role": "user", "content": question}] for question in ANSWERS)
    template = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
    prompts = [template(messages).removeprefix("<s>") for messages in asked]
    pair = map(str, reciting_pair)
    arguments = ["own_tree_policy.py", *pair, *prompts, "--max-tokens", "24"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(EXAMPLES / "own_tree_policy.py"), run_name="__main__")
    output = capsys.readouterr().out
    found = dict(re.findall(r"(\w+): (\d+\.\d\d) tokens per step", output))
    assert list(found) == ["default", "shallow"]
    assert 1.5 < float(found["default"]) <= 6 and 1.5 < float(found["shallow"]) <= 4


@pytest.mark.engine
def test_a_drafter_is_trained_and_used(target: Path, tmp_path: Path) -> None:
    """train_drafter.py, and offline_batch.py with what it made."""
    engine = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a third of vLLM's imports
    }
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"value {i} list {7 * i}" for i in range(40)))
    sizes = ("--max-tokens", 24, "--epochs", 5)
    output = run("train_drafter.py", target, prompts, tmp_path, *sizes, cwd=tmp_path, **engine)
    assert "rows from 40 conversations" in output and "Tokens per target step" in output
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["training"]["data"]["rows"] == 36, "a tenth is held out"

    arguments = (target, tmp_path / "drafter", "--max-tokens", 24)
    output = run("offline_batch.py", *arguments, cwd=tmp_path, **engine)
    *answers, figure = output.strip().splitlines()[-5:]
    assert all(re.fullmatch(r"(['\"]).* -> (['\"]).*", answer) for answer in answers)
    match = re.fullmatch(r"(\d+\.\d\d) tokens per step of the target", figure)
    assert match and 1 <= float(match[1]) <= 6
