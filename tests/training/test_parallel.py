"""Target and drafter shared out over two processes: the training of one that holds both whole."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from redrafter_testing import process_trees
from redrafter_testing.models.sharded_training import job, trained
from redrafter_testing.models.small_trainings import VOCAB_SIZE
from redrafter_testing.models.training_data import write_data
from redrafter_testing.python_path import SUPPORT, python_path
from vllm_redrafter.training.sharded_target import load_sharded_target
from vllm_redrafter.utils.errors import ConfigError

V = VOCAB_SIZE


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, target, num=24, max_tokens=20)
    return folder


@pytest.fixture(scope="module")
def alone(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result and the weights of one process that holds all."""
    output = tmp_path_factory.mktemp("alone")
    result, _, _ = trained(job(str(target), str(data), output))
    return result, load_file(output / "model.safetensors")


@pytest.fixture(scope="module")
def shared(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote."""
    output = tmp_path_factory.mktemp("shared")
    tied = tmp_path_factory.mktemp("tied")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=V, intermediate_size=48, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tied)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "redrafter_testing.models.sharded_training"]
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(SUPPORT),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "1",
    }
    command += map(str, (target, tied, data, output))
    done = process_trees.run(command, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return output


@pytest.fixture(scope="module")
def figures(shared: Path) -> list[dict[str, Any]]:
    """Of each process."""
    return [json.loads((shared / f"process-{rank}.json").read_text()) for rank in (0, 1)]


def test_losses_and_weights_are_those_of_one_process(
    alone: Any, shared: Path, figures: list[dict[str, Any]]
) -> None:
    result, expected = alone
    for found in figures:
        assert found["losses"] == pytest.approx(result.losses, rel=1e-5)
        assert found["tokens_per_step"] == result.acceptance.tokens_per_step
        assert found["bf16"] == pytest.approx(result.losses[:1], rel=1e-2)
        assert found["bf16"] != result.losses[:1]
    weights = load_file(shared / "shared" / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


def test_each_process_holds_half_of_layers_and_moments(figures: list[dict[str, Any]]) -> None:
    for found in figures:
        for held, whole in (found["layers"], found["moments"]):
            assert 0.45 < held / whole < 0.55
        assert found["ends"] == [V, 128], "the output layer is whole"
    assert sum(found["moments"][0] for found in figures) == figures[0]["moments"][1]
    here, all_of_them = (size / 2**20 for size in figures[0]["layers"])
    said = f"of the target's layers {here:,.1f} MiB of {all_of_them:,.1f} are here"
    assert said in figures[0]["printed"] and "AdamW, shared out" in figures[0]["printed"]


def test_a_target_in_bfloat16_with_tied_ends_says_the_same_in_shares(
    figures: list[dict[str, Any]],
) -> None:
    assert [found["difference"] for found in figures] == [0.0, 0.0]


def test_a_run_goes_on_in_shares(alone: Any, shared: Path, figures: list[dict[str, Any]]) -> None:
    result, expected = alone
    for found in figures:
        assert found["resumed"] == pytest.approx(result.losses[2:], rel=1e-5)
    for name, value in load_file(shared / "stopped" / "model.safetensors").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_one_process_goes_on_from_the_same_checkpoint(
    target: Path, data: Path, alone: Any, shared: Path, tmp_path: Path
) -> None:
    result, expected = alone
    shutil.copytree(shared / "shared" / "checkpoints", tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    resumed, _, _ = trained(job(str(target), str(data), tmp_path), resume=True)
    assert resumed.losses == pytest.approx(result.losses[2:], rel=1e-5)
    for name, value in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{"target_parallel": "fsdp"}, {"shard_optimizer": True}])
def test_one_process_has_nobody_to_share_with(
    settings: dict[str, Any], target: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"over processes, and there is one: start several"):
        trained(job(str(target), str(data), tmp_path, **settings))


def test_a_quantised_target_is_not_shared_out(target: Path, tmp_path: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"is quantised, and .* with --other-target"):
        load_sharded_target(tmp_path)


def test_layers_that_are_not_loaded_cannot_be_shared_out(
    target: Path, data: Path, tmp_path: Path
) -> None:
    asked = job(str(target), str(data), tmp_path, target_parallel="fsdp")
    with pytest.raises(ConfigError, match=r"with --hidden-states none is loaded: leave one"):
        trained(replace(asked, hidden_states=(tmp_path,)))


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_accelerate_s_own_sharding_is_refused(
    name: str, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ConfigError, match=r"start without it, and give --shard-optimizer"):
        trained(job(str(target), str(data), tmp_path))
