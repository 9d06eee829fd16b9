# SPDX-License-Identifier: Apache-2.0
"""`--hidden-states`: `train` and `evaluate` do the same as with the target's layers in memory."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from redrafter_testing import process_trees
from redrafter_testing.models import small_trainings
from redrafter_testing.models.training_data import write_data
from redrafter_testing.models.transformers_states import write_states_of
from redrafter_testing.own_commands import printed_by
from vllm_redrafter.data.hidden_states import StatesInfo
from vllm_redrafter.training.plan import TrainingJob
from vllm_redrafter.training.resolution import resolve
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

# One row in a block, and one block at a time: the target computes what it does for states.
SETTINGS = {"micro_batch_size": 1, "block_length": 26}


@pytest.fixture(scope="module")
def states(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_states_of(tmp_path_factory.mktemp("states") / "float32", target, data)


def job(target: Path, data: Path, output: Path, *states: Path, **settings: Any) -> TrainingJob:
    asked = small_trainings.job(target, data, output, **SETTINGS | settings)
    return replace(asked, hidden_states=states)


def run(asked: TrainingJob, **arguments: bool) -> Any:
    return small_trainings.run(asked, **arguments)[0]


@pytest.mark.parametrize("settings", [{"kl_weight": 1}, {"target_layers": "2"}], ids=str)
def test_in_float32_it_is_the_same_training_bit_for_bit(
    settings: dict[str, Any], target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    computed = run(job(target, data, tmp_path / "computed", **settings))
    captured = run(job(target, data, tmp_path / "captured", states, **settings))
    assert captured.losses == computed.losses and len(captured.losses) == 4
    assert captured.acceptance == computed.acceptance and captured.acceptance.steps
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("computed", "captured")
    )
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_two_processes_train_as_one_does(
    target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    alone = run(job(target, data, tmp_path / "alone", states))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "vllm_redrafter", "train", str(target), f"--data={data}"]
    command += [f"--output={tmp_path / 'together'}", f"--hidden-states={states}"]
    command += ["--batch-size=2", "--micro-batch-size=1", "--block-length=26", "--unroll-steps=3"]
    command += ["--warmup-steps=1", "--held-out=4", "--max-steps=4"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "PYTHONSAFEPATH": "1"}
    printed = " ".join(process_trees.output_of(command, env=environment).split())
    assert "on 2 × cpu" in printed and f"loss {alone.loss:.3f}" in printed
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("alone", "together")
    )
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def evaluated(*given: str | Path) -> Any:
    """The figures that `evaluate` writes."""
    figures = Path(given[1]).parent / "figures.json"
    small = ["--beam-widths=1,3", "--beam-lengths=3", "--spec-tokens=4", "--max-length=2048"]
    printed_by("evaluate", *given, *small, f"--json={figures}")
    return json.loads(figures.read_text())


def test_an_evaluation_finds_the_same_without_the_layers(
    target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    trained = tmp_path / "drafter"
    run(job(target, data, trained, states))
    asked = trained, f"--data={data}", "--held-out=4"
    computed = evaluated(target, *asked)
    # Layers of no size can be left out, but not loaded.
    ends = shutil.copytree(target, tmp_path / "ends") / "model.safetensors"
    weights = {n: w[:0] if ".layers." in n else w for n, w in load_file(ends).items()}
    save_file(weights, ends, {"format": "pt"})
    captured = evaluated(ends.parent, *asked, f"--hidden-states={states}", "--other-target")
    assert captured == computed
    assert any(result["tokens_per_step"] > 1 for result in captured["results"])


def test_states_that_do_not_belong_to_the_data_are_refused(
    target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    def refused(match: str, asked: TrainingJob) -> None:
        with pytest.raises(ConfigError, match=match):
            resolve(asked)

    out, other = tmp_path / "out", tmp_path / "other"
    write_data(other, target, num=6, max_tokens=12, seed=6)
    refused("captured from other text than any --data has now", job(target, other, out, states))
    both = replace(job(target, data, out, states), data=(data, other))
    refused(r"none is of the data that .* \(6 conversations\)", both)
    twice = replace(both, hidden_states=(states, states))
    refused("of the same data as another folder", twice)
    other_states = write_states_of(tmp_path / "layers", target, other, layers="none")
    refused(
        r"layers 1, 2 were captured: .* --target-layers 1,2, or",
        job(target, other, out, other_states),
    )
    resolve(job(target, other, out, other_states, target_layers="none"))
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    os.symlink(states / "states-00000.safetensors", quantised / "states-00000.safetensors")
    replace(StatesInfo.load(states), target_fingerprint="quantised").save(quantised)
    asked = job(target, data, out, quantised)
    refused(r"captured from another target .* pass --other-target", asked)
    resolve(replace(asked, other_target=True))
    short = write_states_of(tmp_path / "short", target, data, max_length=16)
    refused(r"rows cut to 16 .* --block-length 16, evaluate", job(target, data, out, short))
    run(job(target, data, out, short, block_length=16), dry_run=True)
