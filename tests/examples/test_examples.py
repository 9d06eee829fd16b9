# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say, on tiny models.

bigram_head.py: tests/engine/test_heads.py; ray_workers.py: tests/offline/test_generation.py.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoTokenizer

from redrafter_testing import process_trees
from redrafter_testing.models.tiny_models import add_tokenizer, make_target
from redrafter_testing.models.training_data import answered
from vllm_redrafter import ReDrafterConfig, save_drafter
from vllm_redrafter.data.rows import ListRows
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.replay.estimate import estimate_acceptance
from vllm_redrafter.replay.target import load_target
from vllm_redrafter.training.initialisation import new_drafter
from vllm_redrafter.training.processes import make_accelerator
from vllm_redrafter.training.resolution import loop_plan, new_head_config
from vllm_redrafter.training.trainer import Trainer
from vllm_redrafter.training.training_config import TrainingConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = [
    "bigram_head.py",
    "offline_batch.py",
    "own_tree_policy.py",
    "ray_workers.py",
    "train_drafter.py",
]
PROMPTS = ["value 3", "list 49 value", "name 7"]
MAX_TOKENS = 48


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("target"))
    add_tokenizer(folder)
    return folder


def run(name: str, *arguments: object, cwd: Path, **environment: str) -> str:
    """What an example prints."""
    done = process_trees.run(
        [sys.executable, "-P", EXAMPLES / name, *arguments],
        timeout=600,
        env={**os.environ, **environment, "COLUMNS": "200"},
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == NAMES
    source = (EXAMPLES / name).read_text()
    assert f"\n    python examples/{name} " in source
    assert len(source.splitlines()) < 80


def written_answers(target: Path, model: Any) -> ListRows:
    """The greedy answers to PROMPTS."""
    tokenizer, rows = AutoTokenizer.from_pretrained(target), ListRows()
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        answer = model.generate(tokens, do_sample=False, max_new_tokens=MAX_TOKENS)
        length = tokens.shape[1]
        rows.append(answered(tokens[0].tolist(), answer[0, length:].tolist()))
    return rows


def taught(rows: ListRows, model: Any, shape: ReDrafterConfig) -> DraftHead:
    """A drafter that has learnt these very rows."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = TrainingConfig(
        max_steps=60, batch_size=1, block_length=256, learning_rate=1e-2, warmup_steps=1
    )
    sizes = new_head_config(config, model.config.vocab_size, model.config.hidden_size)
    drafter, plan = new_drafter(sizes, model.lm_head), loop_plan(config, shape, rows, sizes)
    Trainer(drafter, model, rows, ListRows(), plan, make_accelerator()).run()
    AcceleratorState._reset_state(reset_partial_state=True)
    return drafter.eval()


def test_the_default_policy_of_own_tree_policy_is_that_of_the_engines(
    target: Path, tmp_path: Path
) -> None:
    model = load_target(Target.open(target))
    rows, shape = written_answers(target, model), ReDrafterConfig(8, beam_width=4, beam_length=5)
    drafter = taught(rows, model, shape)
    save_drafter(drafter, tmp_path / "drafter")
    expected = estimate_acceptance(drafter, model, rows, shape).tokens_per_step
    assert expected > 1.5, "the drafter has learnt something"

    arguments = (target, tmp_path / "drafter", *PROMPTS, "--max-tokens", MAX_TOKENS)
    output = run("own_tree_policy.py", *arguments, cwd=tmp_path, OMP_NUM_THREADS="1")
    found = dict(re.findall(r"(\w+): (\d+\.\d\d) tokens per step", output))
    assert list(found) == ["default", "shallow"]
    assert found["default"] == f"{expected:.2f}"
    assert 1 <= float(found["shallow"]) <= 6


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
