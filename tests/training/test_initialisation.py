# SPDX-License-Identifier: Apache-2.0
"""What a training begins with: another drafter, one that gets a selector, and what does not fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redrafter_testing.models.published_speculators import make_mlp
from redrafter_testing.models.small_trainings import VOCAB_SIZE, job, run
from redrafter_testing.models.tiny_models import make_drafter
from redrafter_testing.own_commands import printed_by
from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.reading import Checkpoint, load_drafter
from vllm_redrafter.engine.speculative_config import Request, validated
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.training.initialisation import continued_drafter
from vllm_redrafter.training.plan import TrainingJob
from vllm_redrafter.training.resolution import resolve
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_a_training_goes_on_from_a_drafter(target: Path, data: Path, tmp_path: Path) -> None:
    sizes = {"head": "recurrent", "exit_dim": 24, "draft_vocab_size": 40}
    first = job(target, data, tmp_path / "first", **sizes)
    run(first)
    begun = load_drafter(str(first.output))
    settings = {"max_steps": 1, "learning_rate": 1e-9}
    second = job(target, data, tmp_path / "second", first.output, **settings)
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


def test_a_training_goes_on_from_a_published_speculator(
    target: Path, data: Path, tmp_path: Path
) -> None:
    published = make_mlp(tmp_path / "published", n=3, sizes=(128, 32, VOCAB_SIZE))
    further = job(target, data, tmp_path / "further", published, max_steps=1, unroll_steps=3)
    run(further)
    before, after = (load_drafter(str(d)) for d in (published, further.output))
    assert after.config == before.config and not after.config.tied
    moved = {n for n, t in after.state_dict().items() if not t.equal(before.state_dict()[n])}
    assert moved == set(before.state_dict())
    longer = replace(further, config=replace(further.config, unroll_steps=4))
    with pytest.raises(ConfigError, match=r"^--unroll-steps .*: beam_length 4 exceeds the 3"):
        resolve(longer, dry_run=True)


def test_a_plain_drafter_goes_on_as_a_fused_one(target: Path, data: Path, tmp_path: Path) -> None:
    plain = make_drafter(tmp_path / "plain", VOCAB_SIZE)
    fused = job(target, data, tmp_path / "fused", plain, target_layers="1,2")
    found = Checkpoint.open(str(plain)).head
    begun = continued_drafter(load_drafter(str(plain)), replace(found, target_layers=(1, 2)))
    weights = load_drafter(str(plain)).state_dict()
    assert begun.fuse is not None and not begun.fuse.weight.any()
    assert all(torch.equal(begun.state_dict()[name], weights[name]) for name in weights)

    run(fused)
    trained = load_drafter(str(fused.output))
    assert trained.config == replace(begun.config, target_layers=(1, 2))
    assert trained.fuse is not None and trained.fuse.weight.any()
    assert "| `target_layers` | (1, 2) |" in (fused.output / "README.md").read_text()

    further = job(target, data, tmp_path / "further", fused.output)
    assert resolve(further).head.config.target_layers == (1, 2)


@pytest.mark.parametrize(
    ("sizes", "settings", "message"),
    [
        ({}, {"exit_dim": 24}, r"^--exit-dim 24 does not fit .*: it has 128; leave it out"),
        ({"vocab_size": VOCAB_SIZE + 8}, {}, r"vocabulary size is 72, the target's 64"),
        ({"target_layers": (1, 2)}, {"target_layers": "1"}, r"1 does not fit .*: it reads .* 1,2"),
        (None, {"exit_dim": 24}, "exit_dim: a redrafter_gated head has no such size"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(
    sizes: Any, settings: Any, message: str, target: Path, data: Path, tmp_path: Path
) -> None:
    drafter = None
    if sizes is not None:
        drafter = make_drafter(tmp_path / "drafter", **{"vocab_size": VOCAB_SIZE, **sizes})
    with pytest.raises(ConfigError, match=message):
        resolve(job(target, data, tmp_path / "out", drafter, **settings))


@pytest.fixture(scope="module")
def trained(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    plain = job(target, data, tmp_path_factory.mktemp("plain"), max_steps=30)
    run(plain)
    return plain


def selecting(trained: TrainingJob, output: Path, **settings: Any) -> TrainingJob:
    config = replace(trained.config, **settings)
    return replace(trained, output=output, config=config, add_selector=str(trained.output))


def test_a_selector_is_all_that_is_trained(trained: TrainingJob, tmp_path: Path) -> None:
    asked = selecting(trained, tmp_path / "out", learning_rate=1e-2)
    result, output = run(asked)
    assert "a selector for" in output and "whose weights stay" in output
    assert sum(result.losses[-5:]) < 0.9 * sum(result.losses[:5])
    before, after = load_drafter(str(trained.output)), load_drafter(str(asked.output))
    assert after.config == replace(before.config, selector=SelectorConfig(2, 32))
    for name, tensor in before.state_dict().items():
        assert tensor.equal(after.state_dict()[name]), name
    assert after.selector is not None and all(p.any() for p in after.selector.parameters())
    further = replace(trained, output=tmp_path / "further", initial_drafter=str(asked.output))
    assert resolve(further).head.config.selector is None
    record = read_config(str(asked.output))["training"]
    assert record["settings"] == read_config(str(trained.output))["training"]["settings"]
    assert len(record["selector"]["added_to"]["sha256"]) == 64
    chosen = validated(Request({"model": str(asked.output)}))[0].candidates
    said = {0: "drafts rank the vocabulary", 32: "drafts rank 32 candidates"}[chosen]
    assert said in " ".join(output.split())
    assert "of the tokens per step on" in " ".join(output.split())
    figures, data = tmp_path / "figures.json", f"--data={trained.data[0]}"
    command = ["evaluate", trained.target, str(asked.output), data, f"--json={figures}"]
    grid = ["--beam-widths=2", "--beam-lengths=3", "--spec-tokens=6", "--record"]
    printed_by(*command, *grid)
    found = json.loads(figures.read_text())
    by_candidates = found["tokens_per_step_by_candidates"]
    assert list(by_candidates) == ["all", "32"]
    assert by_candidates["all"] == found["results"][0]["tokens_per_step"]
    keeps = by_candidates["32"] >= 0.995 * by_candidates["all"]
    assert validated(Request({"model": str(asked.output)}))[0].candidates == (32 if keeps else 0)


def test_what_cannot_get_a_selector_is_refused(trained: TrainingJob, tmp_path: Path) -> None:
    def refused(match: str, asked: TrainingJob) -> None:
        with pytest.raises(ConfigError, match=match):
            resolve(asked)

    asked = selecting(trained, tmp_path / "out")
    refused("give one of the two", replace(asked, initial_drafter=str(trained.output)))
    refused("^--unroll-steps 1", selecting(trained, tmp_path / "out", unroll_steps=1))
    refused("^--target-layers 1 does", selecting(trained, tmp_path / "out", target_layers="1"))
