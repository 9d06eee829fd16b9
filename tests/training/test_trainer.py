# SPDX-License-Identifier: Apache-2.0
"""The loop end to end, on a language whose every continuation is known."""

import io
import math
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from rich.console import Console

from redrafter_testing.models.cycle_language import HIDDEN_SIZE, VOCAB_SIZE, CycleTarget, rows
from redrafter_testing.models.training_data import answered
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import ListRows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.heads.registry import NAMES, new_head
from vllm_redrafter.replay.estimate import estimate_acceptance
from vllm_redrafter.training.checkpointing import Checkpoints
from vllm_redrafter.training.initialisation import most_used_tokens, new_drafter
from vllm_redrafter.training.processes import make_accelerator
from vllm_redrafter.training.resolution import loop_plan, new_head_config
from vllm_redrafter.training.trainer import Trainer, warmup_cosine
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError, TrainingError
from vllm_redrafter.utils.settings import option_of

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

L = 4
SPECULATION = ReDrafterConfig(L, beam_width=1, beam_length=L, context_matches=0)
SETTINGS: dict[str, Any] = {
    "max_steps": 100,
    "batch_size": 4,
    "micro_batch_size": 4,
    "block_length": 80,
    "unroll_steps": L,
    "learning_rate": 1e-2,
    "warmup_steps": 10,
    "evaluate_every": 1000,
    "save_every": 1000,
}


def untrained() -> RecurrentHead:
    torch.manual_seed(0)
    return RecurrentHead(RecurrentConfig(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=32))


def trainer(drafter: DraftHead, output: Path | None = None, **settings: Any) -> Trainer:
    config, text = TrainingConfig(**SETTINGS | settings), rows()
    accelerator = make_accelerator(config.precision)
    loop = loop_plan(config, SPECULATION, text, accelerator.num_processes)
    checkpoints = None if output is None else Checkpoints(output)
    console = Console(file=io.StringIO())
    given = drafter, CycleTarget(), text, rows(), loop, accelerator, checkpoints
    return Trainer(*given, console=console)


@pytest.mark.parametrize("kl_weight", [1, 0.5, 0])
def test_a_trained_drafter_predicts_a_certain_language(kl_weight: float) -> None:
    """Training and inference must agree on which hidden state goes with which root."""
    drafter = untrained()
    assert estimate_acceptance(drafter, CycleTarget(), rows(), SPECULATION).tokens_per_step < 2
    result = trainer(drafter, kl_weight=kl_weight).run()
    assert result.losses[-1] < 0.1
    assert result.acceptance.tokens_per_step == L + 1
    assert set(result.acceptance.by_depth) == {result.acceptance.steps}
    assert not drafter.training


def test_small_batches_add_up_to_a_large_one() -> None:
    whole, parts = untrained(), untrained()
    losses = trainer(whole, max_steps=5).run().losses
    accumulated = trainer(parts, max_steps=5, micro_batch_size=1).run().losses
    assert accumulated == pytest.approx(losses, rel=1e-5)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_checkpoints_are_drafters_and_the_last_two_stay(tmp_path: Path) -> None:
    drafter = untrained()
    trainer(drafter, tmp_path, max_steps=7, save_every=2).run()
    paths = Checkpoints(tmp_path).paths()
    assert [path.name for path in paths] == ["step-00000006", "step-00000007"]
    assert torch.equal(load_drafter(str(paths[1])).rnn_w.weight, drafter.rnn_w.weight)
    shutil.copytree(paths[1], paths[1].parent / ".step-00000008.partial")
    assert Checkpoints(tmp_path).newest().step == 7
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        trainer(untrained(), tmp_path / "empty").run(resume=True)


def test_a_loss_that_is_no_number_stops_with_the_last_good_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_redrafter.training.trainer.MAX_GRADIENT_NORM", 1e9)
    settings: dict[str, Any] = {"warmup_steps": 0, "save_every": 1000}
    with pytest.raises(TrainingError, match=r"step \d+: the loss is .*step-0.* has the weights"):
        trainer(untrained(), tmp_path, learning_rate=1e30, **settings).run()
    progress = Checkpoints(tmp_path).newest()
    saved = load_drafter(str(Checkpoints(tmp_path).paths()[-1]))
    assert progress.step >= 1 and math.isfinite(progress.loss)
    assert all(parameter.isfinite().all() for parameter in saved.parameters())


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, limits = Checkpoints.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_a_full_disk(checkpoints: Any, drafter: Any, optimizer: Any, progress: Any) -> Path:
        if progress.step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        return save(checkpoints, drafter, optimizer, progress)

    monkeypatch.setattr(Checkpoints, "save", save_on_a_full_disk)
    try:
        with pytest.raises(TrainingError, match=r"could not be written.*step-00000002 is the last"):
            trainer(untrained(), tmp_path, max_steps=4, save_every=2).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Checkpoints(tmp_path).newest().step == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("name", NAMES)
def test_reduced_precision_trains_float32_parameters(name: str) -> None:
    drafter = new_head(name, VOCAB_SIZE, HIDDEN_SIZE)
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    trainer(drafter, max_steps=2, precision="bf16").run()
    for key, value in drafter.state_dict().items():
        assert value.dtype == torch.float32 and not torch.equal(value, before[key]), key


def test_schedule_warms_up_and_decays_to_zero() -> None:
    factors = [warmup_cosine(step, 4, 20) for step in range(21)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert (factors[12], factors[20]) == pytest.approx((0.5, 0.0))
    assert [warmup_cosine(step, 100, 2) for step in range(2)] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("max_steps", 0, "at least 1"),
        ("unroll_steps", 0, "at least 1"),
        ("warmup_steps", -1, "at least 0"),
        ("learning_rate", math.nan, "a positive number"),
        ("kl_weight", 1.5, "between 0 and 1"),
        ("block_length", 6, "at least 7"),
        ("batch_size", 3, r"a multiple of --micro-batch-size \(2\)"),
        ("precision", "fp16", "one of auto, no, bf16"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any, limit: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option_of(name)} must be {limit}, got {value!r}"):
        TrainingConfig(**{"micro_batch_size": 2, name: value})


def test_new_drafter_starts_from_the_targets_head() -> None:
    target = CycleTarget()
    sizes = new_head_config(TrainingConfig(), VOCAB_SIZE, HIDDEN_SIZE)
    same = new_drafter(sizes, target.lm_head)
    assert torch.equal(same.vocabulary_layer.weight, target.lm_head.weight)
    assert same.vocabulary_layer.weight is not target.lm_head.weight
    kept = torch.tensor([1, 4])
    reduced = new_drafter(replace(sizes, draft_vocab_size=2), target.lm_head, kept)
    assert torch.equal(reduced.vocabulary_layer.weight, target.lm_head.weight[kept])
    assert reduced.target_tokens(torch.tensor([0, 1])).tolist() == [1, 4]


def test_the_most_used_tokens_are_those_of_the_answers() -> None:
    text = ListRows([answered([7, 7, 7, 7], [5, 2, 5, 0, 5, 2])])
    kept, share = most_used_tokens(text, VOCAB_SIZE, 2)
    assert kept.tolist() == [2, 5] and share == pytest.approx(5 / 6)


def test_products_are_bf16_where_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState()  # the device is chosen before there seems to be a GPU
    for name in ("is_available", "is_bf16_supported"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_: True)
    assert make_accelerator().mixed_precision == "bf16"


def test_accelerate_s_own_sharding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"start without it; .* --hidden-states"):
        make_accelerator()
