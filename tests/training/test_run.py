"""`train` and `evaluate` from folder to folder: what they write, resume and refuse."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from redrafter_testing.models.tiny_models import add_tokenizer, make_drafter, make_target
from redrafter_testing.models.training_data import write_data
from vllm_redrafter.budget.costs import CostTable, DraftCost, VerifyCost
from vllm_redrafter.checkpoints.files import read_config
from vllm_redrafter.checkpoints.reading import check_checkpoint, load_drafter
from vllm_redrafter.cli import app
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.dataset import read_dataset
from vllm_redrafter.data.rows import DatasetRows
from vllm_redrafter.errors import ConfigError, TrainingError
from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.medusa import MedusaHead
from vllm_redrafter.speculative_config import validated
from vllm_redrafter.training.batches import TextBatch
from vllm_redrafter.training.config import TrainingConfig
from vllm_redrafter.training.initialisation import continued_drafter, new_drafter
from vllm_redrafter.training.run import TrainingJob, train
from vllm_redrafter.training.target import load_target
from vllm_redrafter.training.teachers import DataTeacher, DraftVocabulary, TargetTeacher

V = 64
CONFIG = TrainingConfig(
    max_steps=4,
    batch_size=2,
    micro_batch_size=2,
    block_length=64,
    unroll_steps=3,
    warmup_steps=1,
    held_out=4,
    save_every=2,
)
SHAPE = ReDrafterConfig(num_speculative_tokens=6, beam_width=2, beam_length=3)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("target"), vocab_size=V)
    add_tokenizer(folder, vocab_size=V)
    return folder


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, target, num=24, max_tokens=20, top_logprobs=V)
    return folder


def job(target: Path, data: Path, output: Path, **settings: Any) -> TrainingJob:
    return TrainingJob(str(target), (data,), output, replace(CONFIG, **settings), SHAPE)


def run(asked: TrainingJob, **arguments: bool) -> tuple[Any, str]:
    AcceleratorState._reset_state(reset_partial_state=True)
    console = Console(file=io.StringIO(), width=200)
    return train(asked, console, **arguments), console.file.getvalue()  # type: ignore[attr-defined]


def test_a_training_goes_on_from_a_drafter(target: Path, data: Path, tmp_path: Path) -> None:
    first = job(target, data, tmp_path / "first", exit_dim=24, draft_vocab_size=40)
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
    plain = make_drafter(tmp_path / "plain", V)
    fused = replace(
        job(target, data, tmp_path / "fused", target_layers="1,2"), initial_drafter=str(plain)
    )
    begun = continued_drafter(str(plain), load_target(target), (1, 2))
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


def test_a_new_fused_drafter_begins_as_the_plain_one(target: Path) -> None:
    model = load_target(target)
    plain = new_drafter(model, TrainingConfig()).state_dict()
    fused = new_drafter(model, TrainingConfig(target_layers="1,2")).state_dict()
    assert not fused.pop("fuse.weight").any()
    assert fused.keys() == plain.keys()
    assert all(torch.equal(fused[name], plain[name]) for name in plain)


def test_layers_that_the_target_lacks_are_refused(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training: target_layers auto needs .* this one has 3"):
        run(job(target, data, tmp_path / "out", target_layers="auto"))
    drafter = make_drafter(tmp_path / "drafter", V, target_layers=(1, 5))
    asked = replace(job(target, data, tmp_path / "out"), initial_drafter=str(drafter))
    with pytest.raises(ConfigError, match=r"layers 1, 5 are asked for, and the target has 3"):
        run(asked)


@pytest.mark.parametrize(("name", "head"), [("gated", GatedHead), ("medusa", MedusaHead)])
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
        run(job(target, data, tmp_path, head="gated", exit_dim=24))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "gated"}, r"head gated does not fit .*: it has recurrent; leave head out"),
        ({"exit_dim": 24}, r"exit_dim 24 does not fit .*: it has 128; leave exit_dim out"),
        ({"draft_vocab_size": 40}, r"draft_vocab_size 40 does not fit .*: it has None"),
        ({"num_draft_layers": 3}, r"num_draft_layers 3 does not fit .*: it has 1"),
        ({"init": "random"}, r"init random does not fit .*: nothing is initialised"),
    ],
)
def test_settings_that_contradict_the_drafter_are_refused(
    settings: dict[str, Any], message: str, target: Path, data: Path, tmp_path: Path
) -> None:
    drafter = make_drafter(tmp_path / "drafter", V)
    asked = replace(job(target, data, tmp_path / "out", **settings), initial_drafter=str(drafter))
    with pytest.raises(ConfigError, match=message):
        run(asked)


def test_a_drafter_of_another_target_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path / "drafter", V + 8)
    asked = replace(job(target, data, tmp_path / "out"), initial_drafter=str(drafter))
    with pytest.raises(ConfigError, match=r"vocabulary of 72 .* this one has 64"):
        run(asked)


def test_a_drafter_comes_with_its_record_and_its_card(
    target: Path, data: Path, tmp_path: Path
) -> None:
    result, printed = run(job(target, data, tmp_path))
    assert "4 steps of 2 blocks on 1 × cpu" in printed and "tokens per target step" in printed
    config = check_checkpoint(str(tmp_path))
    assert (config.vocab_size, config.hidden_size, config.exit_dim) == (V, 128, 128)
    record = read_config(str(tmp_path))
    assert record["speculators_config"]["verifier"]["name_or_path"] == str(target)
    (method,) = record["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == SHAPE.num_speculative_tokens
    assert (method["beam_width"], method["beam_length"]) == (SHAPE.beam_width, SHAPE.beam_length)
    assert record["training"]["settings"]["unroll_steps"] == 3
    assert record["training"]["data"]["rows"] == 20
    assert [source["conversations"] for source in record["training"]["sources"]] == [24]
    assert record["training"]["result"]["tokens_per_step"] == result.acceptance.tokens_per_step
    card = (tmp_path / "README.md").read_text()
    assert f"ReDrafter for {target}" in card and "library_name: vllm" in card
    assert f"{result.acceptance.tokens_per_step:.2f} tokens per target step" in card


@pytest.mark.parametrize("head", [{}, {"head": "gated", "target_layers": "1"}], ids=str)
def test_the_drafter_is_saved_in_the_targets_dtype(
    head: dict[str, Any], target: Path, data: Path, tmp_path: Path
) -> None:
    run(job(target, data, tmp_path, target_dtype="bfloat16", precision="bf16", **head))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    [*_, newest] = sorted((tmp_path / "checkpoints").iterdir())
    tensors = load_file(newest / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_a_reduced_vocabulary_is_that_of_the_answers(
    target: Path, data: Path, tmp_path: Path
) -> None:
    _, printed = run(job(target, data, tmp_path, draft_vocab_size=16))
    assert re.search(r"draft vocabulary: 16 of 64 tokens, \d\d\.\d\d% of the answers", printed)
    drafter = load_drafter(str(tmp_path))
    _, dataset = read_dataset(data)
    kept = set(drafter.target_tokens(torch.arange(16)).tolist())
    counts = torch.zeros(V)
    rows = DatasetRows(dataset, range(24), 64)
    for index in range(24):
        counts += torch.bincount(rows[index].tokens[rows[index].generated], minlength=V)
    assert counts[list(kept)].sum() > 0.95 * counts.topk(16).values.sum()
    assert drafter.vocabulary_layers[0].weight.shape == (16, 128)


def test_all_recorded_top_tokens_are_the_targets_distribution(target: Path, data: Path) -> None:
    """With k = V nothing is missing: both teachers say the same, at the same places."""
    _, dataset = read_dataset(data)
    batch = TextBatch.of([[DatasetRows(dataset, [3], 64)[0]]])
    assert batch.top_tokens is not None and batch.top_log_probs is not None
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model(batch.tokens).last_hidden_state[0]
        written = batch.generated[0].nonzero().flatten()
        vocabulary = DraftVocabulary(load_drafter_of(V))
        recorded = DataTeacher(
            vocabulary, batch.top_tokens[0, written], batch.top_log_probs[0, written], torch.float32
        )
        computed = TargetTeacher(vocabulary, model.lm_head, hidden, written - 1, torch.float32)
        everything = slice(len(written))
        torch.testing.assert_close(recorded(everything), computed(everything))


def load_drafter_of(vocab_size: int) -> Any:
    from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead

    return RecurrentHead(RecurrentConfig(vocab_size, 8, 8))


def test_recorded_distributions_train_as_computed_ones_do(
    target: Path, data: Path, tmp_path: Path
) -> None:
    computed, _ = run(job(target, data, tmp_path / "computed"))
    recorded, _ = run(job(target, data, tmp_path / "recorded", teacher="data"))
    assert recorded.losses == pytest.approx(computed.losses, rel=1e-3)


def test_a_drafter_that_cannot_be_written_is_resumed(
    target: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "README.md").mkdir(parents=True)
    with pytest.raises(TrainingError, match=r"could not be written .* again with --resume"):
        run(job(target, data, tmp_path))
    (tmp_path / "README.md").rmdir()
    run(job(target, data, tmp_path), resume=True)
    assert (tmp_path / "README.md").is_file()


def test_a_dry_run_writes_nothing(target: Path, data: Path, tmp_path: Path) -> None:
    result, printed = run(job(target, data, tmp_path), dry_run=True)
    assert result is None and "nothing was written" in printed and not list(tmp_path.iterdir())


def test_an_output_with_checkpoints_is_resumed_or_refused(
    target: Path, data: Path, tmp_path: Path
) -> None:
    run(job(target, data, tmp_path))
    with pytest.raises(ConfigError, match=r"has checkpoints of an earlier run: --resume goes on"):
        run(job(target, data, tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be resumed with other settings or data"):
        run(job(target, data, tmp_path, seed=1), resume=True)
    with pytest.raises(ConfigError, match=r"cannot be resumed .*'loss': 'lk'"):
        run(job(target, data, tmp_path, loss="lk"), resume=True)


def test_data_of_another_target_or_tokenizer_is_refused(
    target: Path, data: Path, tmp_path: Path
) -> None:
    other = make_target(tmp_path / "other", vocab_size=V, seed=1)
    add_tokenizer(other, vocab_size=V)
    with pytest.raises(ConfigError, match=r"written by another target .* pass --other-target"):
        run(job(other, data, tmp_path / "out"), dry_run=True)
    allowed = replace(job(other, data, tmp_path / "out"), other_target=True)
    run(allowed, dry_run=True)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = [name for name, index in vocabulary.items() if index in (40, 41)]
    vocabulary[names[0]], vocabulary[names[1]] = vocabulary[names[1]], vocabulary[names[0]]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"made with another tokenizer"):
        run(allowed, dry_run=True)


def test_more_is_held_out_than_there_is(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"24 conversations are to be held out .* only 24"):
        run(job(target, data, tmp_path, held_out=24))


def test_several_folders_are_learned_from_and_recorded(
    target: Path, data: Path, tmp_path: Path
) -> None:
    more = tmp_path / "more"
    write_data(more, target, num=6, max_tokens=10, seed=6)
    folders = replace(job(target, data, tmp_path / "out"), data=(data, more))
    _, printed = run(folders)
    assert "26 rows" in printed
    record = read_config(str(tmp_path / "out"))["training"]
    assert record["data"]["rows"] == 26
    assert [source["conversations"] for source in record["sources"]] == [24, 6]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Data, folder 2 of 2" in card
    with pytest.raises(ConfigError, match=r"cannot be resumed with other settings or data"):
        run(job(target, data, tmp_path / "out"), resume=True)


def test_rows_longer_than_a_block_are_cut_and_counted(
    target: Path, data: Path, tmp_path: Path
) -> None:
    _, printed = run(job(target, data, tmp_path, block_length=20), dry_run=True)
    assert re.search(r"\([1-9]\d* rows cut to 20\)", printed)


def arguments(target: Path, data: Path, output: Path) -> list[str]:
    sizes = ["--batch-size=2", "--micro-batch-size=2", "--block-length=64", "--unroll-steps=3"]
    return ["train", str(target), f"--data={data}", f"--output={output}", "--held-out=4", *sizes]


def test_a_killed_run_is_resumed_to_the_same_weights(
    target: Path, data: Path, tmp_path: Path
) -> None:
    """kill -9 anywhere, and the same command with --resume."""
    settings = ["--max-steps=60", "--save-every=5", "--spec-tokens=6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

    def command(output: Path, *more: str) -> list[str]:
        program = [sys.executable, "-m", "vllm_redrafter"]
        return [*program, *arguments(target, data, output), *settings, *more]

    process = subprocess.Popen(command(tmp_path / "killed"), env=environment)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("checkpoints/step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    for output, more in (("killed", ["--resume"]), ("whole", [])):
        subprocess.run(command(tmp_path / output, *more), env=environment, check=True, timeout=200)
    whole, resumed = (load_file(tmp_path / o / "model.safetensors") for o in ("whole", "killed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_commands_say_what_is_wrong(target: Path, data: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, arguments(target, tmp_path / "none", tmp_path / "out"))
    assert result.exit_code == 1 and "no dataset.json there" in result.stderr
    result = runner.invoke(app, [*arguments(target, data, tmp_path / "out"), "--epochs=0"])
    assert result.exit_code == 1 and "epochs must be at least 1, got 0" in result.stderr
    evaluation = ["evaluate", str(target), str(tmp_path / "none"), f"--data={data}"]
    result = runner.invoke(app, evaluation)
    assert result.exit_code == 1 and "no such folder" in result.stderr
    result = runner.invoke(app, [*evaluation, "--spec-tokens=3,x"])
    assert result.exit_code == 1 and "--spec-tokens '3,x': expected integers" in result.stderr


def test_evaluate_prints_writes_and_draws(target: Path, data: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    run(job(target, data, drafter))
    shutil.rmtree(drafter / "checkpoints")
    files = [f"--plot={tmp_path / 'map.png'}", f"--json={tmp_path / 'figures.json'}"]
    grid = ["--beam-widths=1,2", "--beam-lengths=2,3", "--spec-tokens=2,6"]
    command = ["evaluate", str(target), str(drafter), f"--data={data}", "--held-out=4"]
    result = CliRunner().invoke(app, [*command, *grid, *files])
    assert result.exit_code == 0, result.output
    assert "4 rows" in result.output and "If a draft level costs 0.02" in result.output
    assert "assumed and not measured" in " ".join(result.output.split())
    figures = json.loads((tmp_path / "figures.json").read_text())
    shapes = [
        (r["beam_width"], r["beam_length"], r["num_speculative_tokens"]) for r in figures["results"]
    ]
    # A search of 2 x 2 or 1 x 3 has no 6 nodes.
    assert shapes == [(1, 2, 2), (1, 3, 2), (2, 2, 2), (2, 3, 2), (2, 3, 6)]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    # What train says of its held-out conversations, evaluate says of the same ones.
    trained = read_config(str(drafter))["training"]["result"]["tokens_per_step"]
    assert figures["results"][-1]["tokens_per_step"] == pytest.approx(trained)
    assert figures["costs"] == {"assumed": {"draft": 0.02, "verify": 0.005}}

    measured = ["--costs", str(written_costs(tmp_path)), "--requests=2"]
    result = CliRunner().invoke(app, [*command, *grid[1:], *files, *measured])
    assert result.exit_code == 0, result.output
    printed = " ".join(result.output.split())
    assert "measured (a machine), with 2 requests at once: --spec-tokens" in printed
    figures = json.loads((tmp_path / "figures.json").read_text())
    # Without --beam-widths, those that were measured.
    assert {r["beam_width"] for r in figures["results"]} == {1, 2}
    assert figures["costs"]["requests"] == 2
    row = figures["results"][0]
    # A chain of two: one more row per node, and a draft of two levels.
    cost = (0.002 + 0.02 + 6 * 0.001) / (0.02 + 2 * 0.001)
    assert row["speed_up"] == pytest.approx(row["tokens_per_step"] / cost)


def test_evaluate_reads_all_folders_that_train_held_out_of(
    target: Path, data: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_data(other, target, num=12, max_tokens=20, seed=9)
    asked = replace(job(target, data, tmp_path / "drafter"), data=(data, other))
    trained, _ = run(asked)
    figures = tmp_path / "figures.json"
    command = ["evaluate", str(target), str(asked.output), "--held-out=4", f"--json={figures}"]
    command += [f"--data={data}", f"--data={other}"]
    grid = [f"--beam-widths={SHAPE.beam_width}", f"--beam-lengths={SHAPE.beam_length}"]
    nodes = f"--spec-tokens={SHAPE.num_speculative_tokens}"
    result = CliRunner().invoke(app, [*command, *grid, nodes])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(figures.read_text())["results"]
    assert found["tokens_per_step"] == pytest.approx(trained.acceptance.tokens_per_step)


def test_evaluate_records_the_shape_that_it_recommends(
    target: Path, data: Path, tmp_path: Path
) -> None:
    drafter = make_drafter(tmp_path / "drafter", vocab_size=V)
    before = read_config(str(drafter))
    command = ["evaluate", str(target), str(drafter), f"--data={data}", "--beam-widths=2,3"]
    figures = f"--json={tmp_path / 'figures.json'}"
    grid = ["--beam-lengths=2,3", "--spec-tokens=3,6", "--verify-cost=1"]
    plain = CliRunner().invoke(app, [*command, *grid])
    assert plain.exit_code == 0 and read_config(str(drafter)) == before
    result = CliRunner().invoke(app, [*command, *grid, figures, "--record"])
    assert result.exit_code == 0, result.output
    assert f"recorded in {drafter / 'config.json'}" in "".join(result.output.split("\n"))

    shapes = json.loads((tmp_path / "figures.json").read_text())["results"]
    best = max(shapes, key=lambda shape: shape["speed_up"])
    expected = ReDrafterConfig(
        best["num_speculative_tokens"], best["beam_width"], best["beam_length"]
    )
    served, _ = validated({"model": str(drafter)})
    assert served == expected
    served, _ = validated({"model": str(drafter), "beam_length": 9, "tree": "beams"})
    assert served == replace(expected, beam_length=9, tree="beams")
    after = read_config(str(drafter))
    for entry in ("proposal_methods", "default_proposal_method"):
        del after["speculators_config"][entry]
    assert after == before


def test_a_shape_that_cannot_be_recorded_is_said_before_anything_is_evaluated() -> None:
    command = ["evaluate", "no-target", "org/drafter", "--data=none", "--record"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "--record: 'org/drafter' is not a folder" in result.stderr


def written_costs(folder: Path) -> Path:
    """A table: 1 ms per level, and 20 ms and 1 ms per row."""
    draft = [
        DraftCost(requests, width, length, 0.001 * length)
        for requests in (1, 2)
        for width in (1, 2)
        for length in (1, 3)
    ]
    verify = [VerifyCost(rows, 0.02 + 0.001 * rows) for rows in (1, 20)]
    path = folder / "costs.json"
    path.write_text(CostTable("t", "d", "a machine", tuple(draft), tuple(verify)).to_json())
    return path


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "No such file"),
        ("{", [], "give a file that an engine's costs were written to"),
        ("{", [], "not a table of costs"),
        ("[]", [], "not a table of costs"),
        ('{"format": "something else"}', [], "its format is 'something else'"),
        ("", ["--requests=3"], "no draft for 3 requests was measured, only for up to 2"),
        ("", ["--beam-widths=1,4"], "no draft of beam width 4 was measured, only of 1, 2"),
        ("", ["--draft-cost=0.1"], "--costs measures what --draft-cost and --verify-cost assume"),
    ],
)
def test_costs_that_do_not_serve_are_refused_before_anything_is_read(
    content: str | None, options: list[str], message: str, tmp_path: Path
) -> None:
    path = written_costs(tmp_path)
    if content is None:
        path.unlink()
    elif content:
        path.write_text(content)
    command = ["evaluate", "no-target", "no-drafter", "--data=none", f"--costs={path}"]
    grid = ["--beam-lengths=3", "--spec-tokens=3"]
    result = CliRunner().invoke(app, [*command, *grid, *options])
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())


def test_requests_are_for_measured_costs() -> None:
    command = ["evaluate", "no-target", "no-drafter", "--data=none", "--requests=4"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "--requests is for --costs" in result.stderr
