# SPDX-License-Identifier: Apache-2.0
"""The plan of a training: made, and refused, while no weights are there."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redrafter_testing.models.small_trainings import SHAPE, VOCAB_SIZE, job
from vllm_redrafter.cli.main import app
from vllm_redrafter.heads.gated import GatedConfig
from vllm_redrafter.training.plan import TrainingJob
from vllm_redrafter.training.resolution import resolve
from vllm_redrafter.utils.errors import ConfigError


@pytest.fixture
def bare(target: Path, tmp_path: Path) -> Path:
    """The target's configuration and tokenizer alone."""
    folder = shutil.copytree(target, tmp_path / "bare")
    (folder / "model.safetensors").unlink()
    return folder


def asked(bare: Path, data: Path, **settings: Any) -> TrainingJob:
    return replace(job(bare, data, bare.parent / "out", **settings), other_target=True)


def test_a_plan_says_what_will_be_done(bare: Path, data: Path) -> None:
    settings = {"draft_vocab_size": 16, "micro_batch_size": 1}
    plan = resolve(asked(bare, data, **settings), (2, "cpu"))
    assert (len(plan.rows), len(plan.held_out), plan.start) == (20, 4, None)
    head = plan.head.config
    assert (head.vocab_size, head.hidden_size, head.target_layers) == (VOCAB_SIZE, 128, (1, 2))
    assert isinstance(head, GatedConfig)
    assert plan.head.kept is not None and len(plan.head.kept) == head.draft_vocab_size == 16
    assert (plan.loop.num_steps, plan.loop.shape) == (4, SHAPE)
    assert plan.record["settings"]["unroll_steps"] == 3
    assert "4 steps of 2 blocks on 2 × cpu" in plan.table()["steps"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"multiple of micro_batch_size × processes \(2 × 2\)"),
        ({"draft_vocab_size": 65}, "draft_vocab_size 65 exceeds the target's vocabulary"),
        ({"target_layers": "9"}, "target_layers: layers 9 are asked for"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_before_weights_are_loaded(
    settings: dict[str, Any], message: str, bare: Path, data: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(asked(bare, data, **settings), (2, "cpu"))


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_dry_run_prints_the_plan(target: Path, data: Path, tmp_path: Path) -> None:
    sizes = ["--batch-size=2", "--micro-batch-size=2", "--block-length=64", "--unroll-steps=3"]
    command = ["train", str(target), f"--data={data}", f"--output={tmp_path / 'out'}"]
    result = CliRunner().invoke(app, [*command, *sizes, "--held-out=4", "--dry-run"])
    assert result.exit_code == 0, result.output
    training = job(target, data, tmp_path / "out", max_steps=None, warmup_steps=100, save_every=500)
    training = replace(
        training, speculation=replace(SHAPE, num_speculative_tokens=12, beam_width=4)
    )
    printed = "".join(result.output.split())
    for part, words in resolve(training).table().items():
        assert part + "".join(words.split()) in printed
    assert "nothingwaswritten" in printed and not (tmp_path / "out").exists()
