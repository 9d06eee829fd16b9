# SPDX-License-Identifier: Apache-2.0
"""`--hidden-states`: `train` and `evaluate` do the same as with the target's layers in memory."""

import ctypes
import gc
import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from redrafter_testing import process_trees
from redrafter_testing.models.small_trainings import VOCAB_SIZE
from redrafter_testing.models.tiny_models import add_tokenizer
from redrafter_testing.models.training_data import write_data
from redrafter_testing.models.transformers_states import write_states_of
from vllm_redrafter.cli.main import app
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.hidden_states import StatesInfo
from vllm_redrafter.data.source import read_all
from vllm_redrafter.data.target import Target
from vllm_redrafter.training.run import TrainingJob, train
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

V = VOCAB_SIZE
PEAK_SECONDS = 0.002
CONFIG = TrainingConfig(
    max_steps=4,
    batch_size=2,
    # One row in a block, and one block at a time: the target computes what it does for states.
    micro_batch_size=1,
    block_length=26,
    unroll_steps=3,
    warmup_steps=1,
    held_out=4,
)
SHAPE = ReDrafterConfig(num_speculative_tokens=6, beam_width=2, beam_length=3)


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = write_data(folder, target, num=24, max_tokens=20)
    assert sum(2 * len(row.input_ids) > CONFIG.block_length for row in rows) > 20
    return folder


@pytest.fixture(scope="module")
def states(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states") / "float32"
    return write_states_of(folder, target, data, torch.float32)


def job(target: Path, data: Path, output: Path, *states: Path, **settings: Any) -> TrainingJob:
    config = replace(CONFIG, **settings)
    return TrainingJob(str(target), (data,), output, config, SHAPE, hidden_states=states)


def run(asked: TrainingJob, **arguments: bool) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    return train(asked, Console(file=io.StringIO(), width=200), **arguments)


@pytest.mark.parametrize("kind", ["kl", "mix"])
def test_in_float32_it_is_the_same_training_bit_for_bit(
    kind: Any, target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    computed = run(job(target, data, tmp_path / "computed", loss=kind))
    captured = run(job(target, data, tmp_path / "captured", states, loss=kind))
    assert captured.losses == computed.losses and len(captured.losses) == 4
    assert captured.acceptance == computed.acceptance and captured.acceptance.steps
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("computed", "captured")
    )
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_of_what_is_captured_the_layers_that_are_asked_for_are_read(
    target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    for layers in ("1,2", "2", "none"):
        computed = run(job(target, data, tmp_path / f"computed {layers}", target_layers=layers))
        captured = run(
            job(target, data, tmp_path / f"captured {layers}", states, target_layers=layers)
        )
        assert captured.losses == computed.losses and len(captured.losses) == 4
        assert captured.acceptance == computed.acceptance


def test_layers_that_were_not_captured_are_refused(
    target: Path, data: Path, tmp_path: Path
) -> None:
    states = write_states_of(tmp_path / "states", target, data, torch.float32, layers=())
    with pytest.raises(ConfigError, match=r"layers 1, 2 were captured: .* --target-layers 1,2, or"):
        run(job(target, data, tmp_path / "out", states))


def test_in_bfloat16_losses_agree_to_a_thousandth(target: Path, data: Path, tmp_path: Path) -> None:
    """Here with other batches than those that the states were computed in."""
    states = write_states_of(tmp_path / "states", target, data, torch.bfloat16)
    settings = {"target_dtype": "bfloat16", "block_length": 64, "micro_batch_size": 2}
    computed = run(job(target, data, tmp_path / "computed", **settings))
    captured = run(job(target, data, tmp_path / "captured", states, **settings))
    assert captured.losses == pytest.approx(computed.losses, rel=1e-3)
    assert captured.losses != computed.losses, "other roundings would show"


def test_two_processes_train_as_one_does(
    target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    alone = run(job(target, data, tmp_path / "alone", states))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "vllm_redrafter", "train", str(target), f"--data={data}"]
    command += [f"--output={tmp_path / 'together'}", f"--hidden-states={states}"]
    command += ["--batch-size=2", "--micro-batch-size=1", "--block-length=26", "--unroll-steps=3"]
    command += ["--warmup-steps=1", "--held-out=4", "--max-steps=4"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "1",
        "PYTHONSAFEPATH": "1",
    }
    done = process_trees.run(command, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "on 2 × cpu" in " ".join(done.stdout.split())
    assert f"loss {alone.loss:.3f}" in " ".join(done.stdout.split())
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("alone", "together")
    )
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_the_target_s_layers_are_never_in_memory(tmp_path: Path) -> None:
    target = make_thick_target(tmp_path / "target")
    data = tmp_path / "data"
    write_data(data, target, num=6, max_tokens=10)
    states = write_states_of(tmp_path / "states", target, data, torch.float32)
    layers = sum(
        tensor.nbytes
        for name, tensor in load_file(target / "model.safetensors").items()
        if ".layers." in name
    )
    assert layers > 150 * 2**20
    settings = {"held_out": 0, "max_steps": 1, "target_layers": "1,2"}
    computed = peak(lambda: run(job(target, data, tmp_path / "1", **settings), dry_run=True))
    captured = peak(
        lambda: run(job(target, data, tmp_path / "2", states, **settings), dry_run=True)
    )
    assert computed > 0.9 * layers, "what is measured here must show the layers"
    assert captured < 0.3 * layers


def make_thick_target(folder: Path) -> Path:
    """Nearly all of it are layers: 192 MiB."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=128,
        intermediate_size=16384,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    add_tokenizer(folder, vocab_size=V)
    return folder


def peak(measured: Callable[[], Any]) -> int:
    """The most resident memory while it runs, less what there is before, in bytes."""
    # What earlier models leave would be taken by this one's, and nothing be seen of it.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    highest = [before]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(PEAK_SECONDS):
            highest.append(max(highest.pop(), resident()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        measured()
    finally:
        over.set()
        thread.join(timeout=10)
    return max(*highest, resident()) - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def trained(
    target: Path, data: Path, states: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "drafter"
    run(job(target, data, folder, states))
    return folder


def evaluated(*given: str | Path) -> Any:
    """The figures that `evaluate` writes."""
    figures = Path(given[1]).parent / "figures.json"
    small = ["--beam-widths=1,3", "--beam-lengths=3", "--spec-tokens=4", "--max-length=2048"]
    result = CliRunner().invoke(app, ["evaluate", *map(str, given), *small, f"--json={figures}"])
    assert result.exit_code == 0, result.output
    return json.loads(figures.read_text())


def test_an_evaluation_finds_the_same_without_the_layers(
    target: Path, data: Path, states: Path, trained: Path, tmp_path: Path
) -> None:
    asked = trained, f"--data={data}", "--held-out=4"
    computed = evaluated(target, *asked)
    # Layers of no size can be left out, but not loaded.
    ends = shutil.copytree(target, tmp_path / "ends") / "model.safetensors"
    weights = {n: w[:0] if ".layers." in n else w for n, w in load_file(ends).items()}
    save_file(weights, ends, {"format": "pt"})
    captured = evaluated(ends.parent, *asked, f"--hidden-states={states}", "--other-target")
    assert captured == computed
    assert any(result["tokens_per_step"] > 1 for result in captured["results"])


def test_an_evaluation_refuses_states_of_other_text_and_rows_that_are_too_long(
    target: Path, data: Path, states: Path, trained: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_data(other, target, num=6, max_tokens=12, seed=6)
    command = ["evaluate", str(target), str(trained), f"--hidden-states={states}"]
    result = CliRunner().invoke(app, [*command, f"--data={other}"])
    assert result.exit_code == 1 and "captured from other text than any --data" in result.stderr
    short = cut_states(states, data, target, tmp_path / "short", 16)
    command[-1] = f"--hidden-states={short}"
    result = CliRunner().invoke(app, [*command, f"--data={data}"])
    assert result.exit_code == 1 and "evaluate with --max-length 16" in result.stderr


def cut_states(states: Path, data: Path, target: Path, folder: Path, length: int) -> Path:
    """The same states, as if captured with --max-length."""
    folder.mkdir()
    whole = load_file(states / "states-00000.safetensors")
    cut = {name: tensor[: length - 1].contiguous() for name, tensor in whole.items()}
    save_file(cut, folder / "states-00000.safetensors")
    lengths = [
        min(len(row["input_ids"]), length) for row in read_all([data], Target.open(target)).dataset
    ]
    replace(StatesInfo.load(states), max_length=length, num_tokens=sum(lengths)).save(folder)
    return folder


def test_several_data_folders_have_their_own_states(
    target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    more = tmp_path / "more"
    write_data(more, target, num=6, max_tokens=12, seed=6)
    more_states = write_states_of(tmp_path / "more_states", target, more, torch.float32)
    both = replace(job(target, data, tmp_path / "computed"), data=(data, more))
    computed = run(both)
    captured = run(replace(both, output=tmp_path / "c", hidden_states=(more_states, states)))
    assert captured.losses == pytest.approx(computed.losses, rel=1e-4)
    with pytest.raises(ConfigError, match=r"none is of the data that .* \(6 conversations\)"):
        run(replace(both, output=tmp_path / "d", hidden_states=(states,)))
    with pytest.raises(ConfigError, match=r"of the same data as another folder"):
        run(replace(both, output=tmp_path / "d", hidden_states=(states, states)))


def test_states_of_other_text_or_another_target_are_refused(
    target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_data(other, target, num=6, max_tokens=12, seed=6)
    with pytest.raises(ConfigError, match=r"captured from other text than any --data has now"):
        run(job(target, other, tmp_path / "out", states))
    info = StatesInfo.load(states)
    copied = tmp_path / "copied"
    copied.mkdir()
    os.symlink(states / "states-00000.safetensors", copied / "states-00000.safetensors")
    replace(info, target_fingerprint="quantised").save(copied)
    with pytest.raises(ConfigError, match=r"captured from another target .* pass --other-target"):
        run(job(target, data, tmp_path / "out", copied))
    allowed = replace(job(target, data, tmp_path / "out", copied), other_target=True)
    run(allowed, dry_run=True)


def test_rows_longer_than_what_was_captured_are_refused(
    target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    short = cut_states(states, data, target, tmp_path / "short", 16)
    with pytest.raises(ConfigError, match=r"rows cut to 16 .* --block-length 16, evaluate with"):
        run(job(target, data, tmp_path / "out", short))
    run(job(target, data, tmp_path / "out", short, block_length=16), dry_run=True)


def test_the_command_says_what_is_wrong(target: Path, data: Path, tmp_path: Path) -> None:
    command = ["train", str(target), f"--data={data}", f"--output={tmp_path / 'out'}"]
    result = CliRunner().invoke(app, [*command, "--held-out=4", f"--hidden-states={tmp_path}"])
    assert result.exit_code == 1 and "no states.json there" in result.stderr


def test_a_run_is_not_resumed_with_states_that_it_began_without(
    target: Path, data: Path, states: Path, tmp_path: Path
) -> None:
    run(job(target, data, tmp_path, max_steps=2))
    with pytest.raises(ConfigError, match=r"hidden_states: 'captured', not None"):
        run(job(target, data, tmp_path, states, max_steps=2), resume=True)
