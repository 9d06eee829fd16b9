# SPDX-License-Identifier: Apache-2.0
"""What a training begins with: another drafter, another head, and what does not fit them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redrafter_testing.models.small_trainings import VOCAB_SIZE, job, run
from redrafter_testing.models.tiny_models import make_drafter
from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.reading import Checkpoint, load_drafter
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.medusa import MedusaHead
from vllm_redrafter.heads.recurrent import RecurrentHead
from vllm_redrafter.training.initialisation import continued_drafter, new_drafter
from vllm_redrafter.training.resolution import new_head_config
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_a_training_goes_on_from_a_drafter(target: Path, data: Path, tmp_path: Path) -> None:
    sizes = {"head": "recurrent", "exit_dim": 24, "draft_vocab_size": 40}
    first = job(target, data, tmp_path / "first", **sizes)
    run(first)
    begun = load_drafter(str(first.output))
    second = replace(
        job(target, data, tmp_path / "second", max_steps=1, learning_rate=1e-9),
        initial_drafter=str(first.output),
    )
    result, output = run(second)
    assert result.steps == 1 and "goes on from" in output and "draft vocabulary" not in output

    trained = load_drafter(str(second.output))
    assert trained.config == begun.config
    for name, tensor in begun.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=0, atol=1e-6)
    record = read_config(str(second.output))["training"]
    assert record["settings"]["exit_dim"] == 24 and record["settings"]["draft_vocab_size"] == 40
    assert len(record["initial_drafter"]["sha256"]) == 64
    assert record["initial_drafter"]["sha256"] in (second.output / "README.md").read_text()


def test_a_training_that_goes_on_moves_all_weights(
    target: Path, data: Path, tmp_path: Path
) -> None:
    first = job(target, data, tmp_path / "first")
    run(first)
    begun = load_drafter(str(first.output)).state_dict()
    second = replace(job(target, data, tmp_path / "second"), initial_drafter=str(first.output))
    run(second)
    trained = load_drafter(str(second.output)).state_dict()
    same = [name for name in begun if torch.equal(begun[name], trained[name])]
    assert not [name for name in same if begun[name].is_floating_point()]


def test_a_plain_drafter_goes_on_as_a_fused_one(target: Path, data: Path, tmp_path: Path) -> None:
    plain = make_drafter(tmp_path / "plain", VOCAB_SIZE)
    fused = replace(
        job(target, data, tmp_path / "fused", target_layers="1,2"), initial_drafter=str(plain)
    )
    found = Checkpoint.open(str(plain)).head
    begun = continued_drafter(str(plain), replace(found, target_layers=(1, 2)))
    weights = load_drafter(str(plain)).state_dict()
    assert begun.fuse is not None and not begun.fuse.weight.any()
    assert all(torch.equal(begun.state_dict()[name], weights[name]) for name in weights)

    run(fused)
    trained = load_drafter(str(fused.output))
    assert trained.config == replace(begun.config, target_layers=(1, 2))
    assert trained.fuse is not None and trained.fuse.weight.any()
    assert read_config(str(fused.output))["training"]["settings"]["target_layers"] == "1,2"
    assert "| `target_layers` | (1, 2) |" in (fused.output / "README.md").read_text()

    further = replace(job(target, data, tmp_path / "further"), initial_drafter=str(fused.output))
    run(further)
    assert load_drafter(str(further.output)).config.target_layers == (1, 2)
    other = replace(
        job(target, data, tmp_path / "other", target_layers="1"), initial_drafter=str(fused.output)
    )
    with pytest.raises(ConfigError, match=r"target_layers 1 does not fit .*: it reads layers 1,2"):
        run(other)


def test_a_new_fused_drafter_begins_as_the_plain_one() -> None:
    plain, fused = (
        new_drafter(new_head_config(TrainingConfig(target_layers=layers), 64, 32)).state_dict()
        for layers in ("none", "1,2")
    )
    assert not fused.pop("fuse.weight").any()
    assert fused.keys() == plain.keys()
    assert all(torch.equal(fused[name], plain[name]) for name in plain)


def test_layers_that_the_target_lacks_are_refused(target: Path, data: Path, tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path / "drafter", VOCAB_SIZE, target_layers=(1, 5))
    asked = replace(job(target, data, tmp_path / "out"), initial_drafter=str(drafter))
    with pytest.raises(ConfigError, match=r"layers 1, 5 are asked for, and the target has 3"):
        run(asked)


@pytest.mark.parametrize(("name", "head"), [("recurrent", RecurrentHead), ("medusa", MedusaHead)])
def test_another_head_is_trained_and_trained_on(
    name: str, head: type[DraftHead], target: Path, data: Path, tmp_path: Path
) -> None:
    first = job(target, data, tmp_path / "first", head=name, draft_vocab_size=40)
    run(first)
    begun = load_drafter(str(first.output))
    assert isinstance(begun, head)
    assert begun.config.max_beam_length in (None, first.config.unroll_steps)
    second = replace(
        job(target, data, tmp_path / "second", max_steps=1), initial_drafter=str(first.output)
    )
    run(second)
    assert load_drafter(str(second.output)).config == begun.config
    assert read_config(str(second.output))["training"]["settings"]["head"] == name


def test_a_size_that_the_head_has_not_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exit_dim: a redrafter_gated head has no such size"):
        run(job(target, data, tmp_path, exit_dim=24))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "medusa"}, r"head medusa does not fit .*: it has recurrent; leave head out"),
        ({"exit_dim": 24}, r"exit_dim 24 does not fit .*: it has 128; leave exit_dim out"),
        ({"draft_vocab_size": 40}, r"draft_vocab_size 40 does not fit .*: it has None"),
        ({"num_draft_layers": 3}, r"num_draft_layers 3 does not fit .*: it has 1"),
        ({"init": "random"}, r"init random does not fit .*: nothing is initialised"),
    ],
)
def test_settings_that_contradict_the_drafter_are_refused(
    settings: dict[str, Any], message: str, target: Path, data: Path, tmp_path: Path
) -> None:
    drafter = make_drafter(tmp_path / "drafter", VOCAB_SIZE)
    asked = replace(job(target, data, tmp_path / "out", **settings), initial_drafter=str(drafter))
    with pytest.raises(ConfigError, match=message):
        run(asked)


def test_a_drafter_of_another_target_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path / "drafter", VOCAB_SIZE + 8)
    asked = replace(job(target, data, tmp_path / "out"), initial_drafter=str(drafter))
    with pytest.raises(ConfigError, match=r"vocabulary size is 72, the target's 64"):
        run(asked)
