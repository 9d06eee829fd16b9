# SPDX-License-Identifier: Apache-2.0
"""Conversion changes the form of a checkpoint and no bit of it; what cannot be is refused whole."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redrafter_testing.models.checkpoints import BARE, PLAIN, PROJECTED, edit_config, edit_tensors
from redrafter_testing.own_commands import printed_by
from vllm_redrafter.checkpoints import drafter_files
from vllm_redrafter.checkpoints.conversion import convert
from vllm_redrafter.checkpoints.reading import Checkpoint, load_drafter
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.utils.errors import ConfigError

REDUCED = RecurrentConfig(11, 4, exit_dim=6, draft_vocab_size=3)
ALL_TOKENS = [PROJECTED, PLAIN, BARE]
KEPT = torch.tensor([2, 3, 9])
TRAINING = {"settings": {"loss": "kl"}, "result": {"steps": 7}}


def new_drafter(config: RecurrentConfig, dtype: torch.dtype = torch.float32) -> RecurrentHead:
    torch.manual_seed(0)
    drafter = RecurrentHead(config).to(dtype).requires_grad_(False)
    if config.draft_vocab_size:
        drafter.keep_tokens(KEPT)
    return drafter


def assert_bits(folder: Path, expected: dict[str, Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("config", ALL_TOKENS, ids=["projected", "plain", "bare"])
def test_a_conversion_is_bit_exact(
    tmp_path: Path, config: RecurrentConfig, dtype: torch.dtype
) -> None:
    drafter = new_drafter(config, dtype)
    # Bits that arithmetic would lose.
    drafter.vocabulary_layer.weight[0, :3] = torch.tensor([-0.0, torch.nan, -torch.inf])
    save_drafter(drafter, tmp_path / "a")
    convert(str(tmp_path / "a"), tmp_path / "b")
    assert_bits(tmp_path / "b", drafter.state_dict())
    assert Checkpoint.open(str(tmp_path / "b")).head == config
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()


def test_our_own_form_keeps_the_draft_vocabulary_and_the_records(
    tmp_path: Path, destination: Path
) -> None:
    acceptance = {"greedy": {"slope": 0.5, "biases": [0.1], "survival": [[0.4, 0.2]]}}
    records: Any = {"verifier": "org/target", "training": TRAINING, "acceptance": acceptance}
    save_drafter(new_drafter(REDUCED), tmp_path / "a", shape={"beam_width": 3}, **records)
    (tmp_path / "a/README.md").write_text("# its card")
    convert(str(tmp_path / "a"), destination)
    assert_bits(destination, new_drafter(REDUCED).state_dict())
    for name in ("config.json", "README.md"):
        assert (tmp_path / "a" / name).read_text() == (destination / name).read_text()
    assert load_drafter(str(destination)).target_tokens(torch.arange(3)).equal(KEPT)


@pytest.mark.parametrize("config", [*ALL_TOKENS, REDUCED])
def test_sizes_are_read_off_the_tensors(
    tmp_path: Path, destination: Path, config: RecurrentConfig
) -> None:
    source = tmp_path / "a"
    save_drafter(new_drafter(config), source)
    known = {"num_lookback_tokens": config.num_lookback_tokens, "vocab_size": config.vocab_size}
    (source / "config.json").write_text(json.dumps(known))
    if config == PROJECTED:
        (source / "config.json").unlink()
    notes = convert(str(source), destination)
    assert Checkpoint.open(str(destination)).head == config
    for name in ("hidden_size", "exit_dim", "num_draft_layers", "rnn"):
        value = getattr(config, name)
        assert f"{name} = {value!r}: not in config.json, read off the tensors" in notes


def test_tensors_of_a_pickle_may_share_memory(source: Path, destination: Path) -> None:
    """Which safetensors refuses to write."""
    tensors = new_drafter(PROJECTED).state_dict()
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    parts = zip(tensors.items(), flat.split([t.numel() for t in tensors.values()]), strict=True)
    (source / "model.safetensors").unlink()
    stored = {name: part.view(like.shape) for (name, like), part in parts}
    torch.save(stored, source / "pytorch_model.bin")
    convert(str(source), destination)
    assert_bits(destination, tensors)


NO_DRAFTER = "not a ReDrafter's weights: expected one matrix"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, NO_DRAFTER),
        ({"model.embed.weight": torch.zeros(2, 2)}, NO_DRAFTER),
        ({"lm_head.0.weight": torch.zeros(2, 2), "lm_head.1.weight": torch.eye(2)}, NO_DRAFTER),
        ({"lm_head.0.weight": torch.zeros(2)}, NO_DRAFTER),
        ({"lm_head.0.weight": torch.zeros(11, 7)}, "the head reads 7 numbers"),
    ],
)
def test_another_models_tensors_are_refused(
    source: Path, destination: Path, tensors: dict[str, Tensor], message: str
) -> None:
    (source / "config.json").unlink()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        convert(str(source), destination)


@pytest.mark.parametrize(
    ("entries", "tensors", "message"),
    [
        ({"vocab_size": 12}, {}, "vocab_size is 12 in config.json, 11 by the tensors"),
        ({"exit_dim": -1}, {}, "exit_dim is -1 in config.json, 6 by the tensors"),
        ({"rnn": 1}, {}, "rnn is 1 in config.json, True by the tensors"),
        ({"hidden_size": "4"}, {}, "hidden_size is '4' in config.json, 4 by the tensors"),
        ({"draft_vocab_size": 5}, {}, "draft_vocab_size is 5 in config.json, None by the tensors"),
        ({"model_type": "medusa"}, {}, "or \"redrafter_gated\".*, found 'medusa'"),
        ({"vocab_size": None}, {"d2t": torch.arange(11)}, "must say vocab_size, the target's"),
        ({}, {"lm_heads.2.weight": torch.zeros(11, 6)}, r"lm_heads?\.2\.weight are one tensor"),
        ({}, {"rnn_u.bias": torch.zeros(4).char()}, r"be float32.* but rnn_u\.bias is int8"),
    ],
    ids=str,
)
def test_contradictions_and_damaged_tensors_are_refused(
    source: Path, destination: Path, entries: dict[str, Any], tensors: Any, message: str
) -> None:
    edit_config(source, lambda values: values.update(entries))
    edit_tensors(source, lambda stored: stored.update(tensors))
    with pytest.raises(ConfigError, match=message):
        convert(str(source), destination)
    assert not destination.exists()


# --- The destination: all of a checkpoint or nothing, and no file of the user's is overwritten ---


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_empty_folders_links_to_them_and_new_paths_are_taken(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for destination in (tmp_path / "link", tmp_path / "some" / "new" / "folder"):
        convert(str(source), destination)
        assert Checkpoint.open(str(destination)).head == PROJECTED
    assert (tmp_path / "link").is_symlink()
    assert files(tmp_path / "some/new") == ["folder"]
    # As any folder that the user makes, not as a temporary one.
    made = tmp_path / "some"
    assert (made / "new/folder").stat().st_mode == made.stat().st_mode


def test_other_content_is_left_alone(source: Path, destination: Path) -> None:
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(ConfigError, match="is not empty: give another destination, or delete it"):
        convert(str(source), source)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    destination.write_text("mine")
    with pytest.raises(ConfigError, match="is a file: give another destination"):
        convert(str(source), destination)
    assert destination.read_text() == "mine"


@pytest.mark.parametrize("existed", [True, False])
def test_a_failure_leaves_nothing_behind(source: Path, destination: Path, existed: bool) -> None:
    if existed:
        destination.mkdir()
    (source / "README.md").write_text("the last file to be written")
    full = patch.object(shutil, "copyfile", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(ConfigError, match=r"cannot be written: .* make room"):
        convert(str(source), destination)
    assert files(source.parent) == (["destination", "source"] if existed else ["source"])
    assert not existed or not files(destination)


# --- The hub, and the command ---


def test_a_hub_id_is_converted_without_a_card_that_is_out_of_reach(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo: str, name: str, revision: str | None = None) -> str:
        if name == "README.md":
            raise ConnectionError("offline")
        return str(source / name)

    monkeypatch.setattr(drafter_files, "hf_hub_download", download)
    notes = convert("org/drafter", destination)
    assert_bits(destination, new_drafter(PROJECTED).state_dict())
    assert any(note.startswith("its README.md is left out") for note in notes)


def test_the_command_says_what_it_did(source: Path, destination: Path) -> None:
    edit_config(source, lambda values: values.pop("exit_dim"))
    said = "read model.safetensors exit_dim = 6: not in config.json, read off the tensors wrote "
    printed = printed_by("convert", source, destination, "--target=org/target")
    assert printed == said + str(destination)
    values = json.loads((destination / "config.json").read_text())
    assert values["speculators_config"]["verifier"]["name_or_path"] == "org/target"
