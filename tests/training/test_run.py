# SPDX-License-Identifier: Apache-2.0
"""`train` from folder to folder: what it plans, writes, resumes and refuses."""

import itertools
import shutil
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from safetensors.torch import load_file
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from redrafter_testing import process_trees
from redrafter_testing.models.small_trainings import SHAPE, VOCAB_SIZE, job, run
from redrafter_testing.own_commands import printed_by
from vllm_redrafter.checkpoints.acceptance import acceptance_of
from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.heads.gated import GatedConfig
from vllm_redrafter.training.distillation import Distillation
from vllm_redrafter.training.plan import TrainingJob
from vllm_redrafter.training.resolution import resolve
from vllm_redrafter.utils.errors import ConfigError, TrainingError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_a_drafter_comes_with_its_record_and_its_card(
    target: Path, data: Path, tmp_path: Path
) -> None:
    result, printed = run(job(target, data, tmp_path))
    assert list((tmp_path / "logs").rglob("events.out.tfevents.*"))
    assert "4 steps of 2 blocks on 1 × cpu" in printed and "tokens per target step" in printed
    assert Checkpoint.open(str(tmp_path)).checked().head.target_layers == (1, 2)
    record = read_config(str(tmp_path))
    assert record["speculators_config"]["verifier"]["name_or_path"] == str(target)
    (method,) = record["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == SHAPE.num_speculative_tokens
    assert (method["beam_width"], method["beam_length"]) == (SHAPE.beam_width, SHAPE.beam_length)
    assert record["training"]["settings"]["unroll_steps"] == 3
    assert record["training"]["data"]["rows"] == 20
    assert record["training"]["result"]["tokens_per_step"] == result.acceptance.tokens_per_step
    recorded = acceptance_of(record)
    assert recorded.greedy is not None and recorded.sampled is None, "the data is greedy"
    card = (tmp_path / "README.md").read_text()
    assert f"ReDrafter for {target}" in card and "library_name: vllm" in card
    assert f"{result.acceptance.tokens_per_step:.2f} tokens per target step" in card


def test_drafters_are_saved_in_the_targets_dtype(target: Path, data: Path, tmp_path: Path) -> None:
    run(job(target, data, tmp_path, target_dtype="bfloat16", precision="bf16"))
    [*_, newest] = sorted((tmp_path / "checkpoints").iterdir())
    for folder, dtype in ((tmp_path, torch.bfloat16), (newest, torch.float32)):
        tensors = load_file(folder / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}


def test_an_output_with_checkpoints_is_resumed_or_refused(
    target: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "README.md").mkdir(parents=True)
    with pytest.raises(TrainingError, match=r"cannot be written: .* again with --resume"):
        run(job(target, data, tmp_path))
    written = read_config(str(tmp_path))
    (tmp_path / "README.md").rmdir()
    with pytest.raises(ConfigError, match=r"has checkpoints of an earlier run: --resume goes on"):
        run(job(target, data, tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be resumed .*'kl_weight': 0"):
        run(job(target, data, tmp_path, kl_weight=0), resume=True)
    run(job(target, data, tmp_path), resume=True)
    assert read_config(str(tmp_path)) == written
    assert "tokens per target step on held-out" in (tmp_path / "README.md").read_text()


def arguments(target: Path, data: Path, output: Path) -> list[str]:
    sizes = ["--batch-size=2", "--micro-batch-size=2", "--block-length=64", "--unroll-steps=3"]
    return ["train", str(target), f"--data={data}", f"--output={output}", "--held-out=4", *sizes]


def test_a_killed_run_resumes_to_the_same_weights(target: Path, data: Path, tmp_path: Path) -> None:
    """kill -9 anywhere, and the same command with --resume, in another process."""

    def command(output: str) -> list[str]:
        return [*arguments(target, data, tmp_path / output), "--max-steps=60", "--save-every=5"]

    program = [sys.executable, "-P", "-m", "vllm_redrafter", *command("killed")]
    with process_trees.started(program) as process:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "killed").glob("checkpoints/step-*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    for again in ([*command("killed"), "--resume"], command("whole")):
        printed_by(*again)
    whole, resumed = (load_file(tmp_path / o / "model.safetensors") for o in ("whole", "killed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_group_of_processes_ends_after_what_refers_to_it(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reducer that outlives the group can hang for ever when it is freed."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    group = weakref.ref(distributed.group.WORLD)
    calls, referring, left = itertools.count(), list[weakref.ref[Any]](), list[int]()
    forward, prepare = Distillation.forward, Accelerator.prepare
    destroy = PartialState.destroy_process_group

    def prepare_for_several(accelerator: Accelerator, given: Any) -> Any:
        if not isinstance(given, Distillation):
            return prepare(accelerator, given)
        model = DistributedDataParallel(given)
        referring.extend((weakref.ref(model.reducer), weakref.ref(model.logger)))
        return model

    def forward_and_stop(model: Distillation, *given: Any) -> Any:
        if next(calls) == 2:
            raise TrainingError("made up")
        return forward(model, *given)

    def count_and_destroy(state: PartialState, *given: Any) -> None:
        left.append(sum(found() is not None for found in referring))
        destroy(state, *given)

    monkeypatch.setattr(Accelerator, "prepare", prepare_for_several)
    monkeypatch.setattr(Distillation, "forward", forward_and_stop)
    monkeypatch.setattr(PartialState, "destroy_process_group", count_and_destroy)
    with pytest.raises(TrainingError, match="made up"):
        run(job(target, data, tmp_path))
    assert len(referring) == 2 and left == [0]
    assert not distributed.is_initialized() and group() is None


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
        ({}, r"multiple of --micro-batch-size × processes \(2 × 2\)"),
        ({"draft_vocab_size": 65}, "draft_vocab_size 65 exceeds the target's vocabulary"),
        ({"target_layers": "9"}, "^--target-layers: layers 9 are asked for"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_before_weights_are_loaded(
    settings: dict[str, Any], message: str, bare: Path, data: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(asked(bare, data, **settings), (2, "cpu"))


def test_a_dry_run_prints_the_plan(target: Path, data: Path, tmp_path: Path) -> None:
    printed = printed_by(*arguments(target, data, tmp_path / "out"), "--dry-run").replace(" ", "")
    training = job(target, data, tmp_path / "out", max_steps=None, warmup_steps=100, save_every=500)
    speculation = replace(SHAPE, num_speculative_tokens=12, beam_width=4)
    training = replace(training, speculation=speculation)
    for part, words in resolve(training).table().items():
        assert part + "".join(words.split()) in printed
    assert "nothingwaswritten" in printed and not (tmp_path / "out").exists()
