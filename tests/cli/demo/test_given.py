# SPDX-License-Identifier: Apache-2.0
"""Targets and drafters that the user gives, in the demo."""

from pathlib import Path

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from vllm_redrafter import save_drafter
from vllm_redrafter.cli.demo.given import check_sizes
from vllm_redrafter.cli.main import app
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.utils.errors import ConfigError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    config = LlamaConfig(vocab_size=20, hidden_size=8, num_attention_heads=2)
    config.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_an_unusable_target_folder_is_named(tmp_path: Path) -> None:
    arguments = ["--cache-dir", str(tmp_path), "--target", str(tmp_path / "none")]
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 1
    assert "no config.json there" in result.stderr and "leave --target out" in result.stderr


def test_a_drafter_of_other_sizes_is_refused(target: Path, tmp_path: Path) -> None:
    save_drafter(RecurrentHead(RecurrentConfig(20, 4, 4)), tmp_path / "drafter")
    with pytest.raises(
        ConfigError, match=r"mine does not fit .*hidden size is 4, the target's 8: fetch it"
    ):
        check_sizes(target, tmp_path / "drafter", "mine", "fetch it")


def test_the_packages_drafter_is_refused_for_another_target(target: Path, tmp_path: Path) -> None:
    arguments = ["--cache-dir", str(tmp_path), "--target", str(target)]
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 1
    assert "comes with this package, does not fit the target" in result.stderr
    assert "give a --drafter for that target" in result.stderr


def test_a_drafter_of_the_users_own_must_fit_as_well(target: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    save_drafter(RecurrentHead(RecurrentConfig(20, 4, 4)), drafter)
    arguments = ["--cache-dir", str(tmp_path), "--target", str(target), "--drafter", str(drafter)]
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 1
    assert "give the --target that it was trained for" in result.stderr
