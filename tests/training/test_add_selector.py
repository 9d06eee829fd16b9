# SPDX-License-Identifier: Apache-2.0
"""Training a selector: what it tells, and what stays as it was."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redrafter_testing.models.small_trainings import VOCAB_SIZE, job, run
from redrafter_testing.models.tiny_models import make_medusa
from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.cli.main import app
from vllm_redrafter.engine.speculative_config import Request, validated
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.training.plan import TrainingJob
from vllm_redrafter.training.resolution import resolve
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


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
    result = CliRunner().invoke(app, [*command, *grid])
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    by_candidates = found["tokens_per_step_by_candidates"]
    assert list(by_candidates) == ["all", "32"]
    assert by_candidates["all"] == found["results"][0]["tokens_per_step"]
    keeps = by_candidates["32"] >= 0.995 * by_candidates["all"]
    assert validated(Request({"model": str(asked.output)}))[0].candidates == (32 if keeps else 0)


def test_what_cannot_get_a_selector_is_refused(
    target: Path, data: Path, trained: TrainingJob, tmp_path: Path
) -> None:
    def refused(match: str, asked: TrainingJob) -> None:
        with pytest.raises(ConfigError, match=match):
            resolve(asked)

    asked = selecting(trained, tmp_path / "out")
    refused("give one of the two", replace(asked, initial_drafter=str(trained.output)))
    refused("unroll_steps 1", selecting(trained, tmp_path / "out", unroll_steps=1))
    refused("target_layers 1 does not fit", selecting(trained, tmp_path / "out", target_layers="1"))
    medusa = make_medusa(tmp_path / "medusa", VOCAB_SIZE)
    refused("redrafter_medusa head takes none", replace(asked, add_selector=str(medusa)))
