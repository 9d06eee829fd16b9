# SPDX-License-Identifier: Apache-2.0
"""`capture` without vLLM: what it writes, resumes and refuses."""

import io
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from redrafter_testing.models.training_data import write_data
from redrafter_testing.models.transformers_states import TransformersStates
from vllm_redrafter.data.dataset import read_dataset
from vllm_redrafter.data.hidden_states import StatesInfo, StoredStates
from vllm_redrafter.data.rows import row_lengths
from vllm_redrafter.data.settings import CaptureSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.target_layers import named_layers
from vllm_redrafter.offline import capture as capturing
from vllm_redrafter.offline.capture import CaptureJob, capture
from vllm_redrafter.replay.target import load_target
from vllm_redrafter.utils.errors import ConfigError, TrainingError

H = 128
SHARD_BYTES = 100 * H * 4


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, target, num=12, max_tokens=20)
    return folder


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "SHARD_BYTES", SHARD_BYTES)


def run(
    target: Path, data: Path, output: Path, engine: Any = TransformersStates, **settings: Any
) -> str:
    console = Console(file=io.StringIO(), width=200)
    capture(CaptureJob(str(target), data, output, CaptureSettings(**settings)), engine, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def stored(data: Path, output: Path) -> StoredStates:
    return StoredStates(output, row_lengths(read_dataset(data)[1]))


def never(*_: Any) -> Any:
    pytest.fail("nothing is missing, and an engine was started")


class Breaking(TransformersStates):
    """Dies after nine rows."""

    def states(self, texts: Iterable[tuple[int, list[int]]]) -> Iterator[tuple[int, Tensor]]:
        for index, found in enumerate(super().states(texts)):
            if index == 9:
                raise ConfigError("vLLM failed while capturing")
            yield found


@pytest.mark.parametrize(
    ("dtype", "layers", "max_length"), [("auto", (), 10), ("bfloat16", (), 64), ("auto", (1,), 64)]
)
def test_every_row_s_states_are_the_target_s_behind_the_norm(
    dtype: str, layers: tuple[int, ...], max_length: int, target: Path, data: Path, tmp_path: Path
) -> None:
    settings = {"dtype": dtype, "target_layers": named_layers(layers), "max_length": max_length}
    printed = run(target, data, tmp_path, **settings)
    model = load_target(Target.open(target), dtype)
    states, dataset = stored(data, tmp_path), read_dataset(data)[1]
    assert 10 < max(map(len, dataset["input_ids"])) < 64
    for row, values in enumerate(dataset):
        tokens = torch.tensor([values["input_ids"][:max_length][:-1]])
        with torch.no_grad():
            found = model.base_model(tokens, use_cache=False, output_hidden_states=True)
        others = [found.hidden_states[layer][0] for layer in layers]
        assert torch.equal(states[row], torch.cat([found.last_hidden_state[0], *others], 1)), row
    assert states.info.target_layers == layers
    assert states.info.num_rows == 12 and len(StatesInfo.finished_shards(tmp_path)) > 1
    written = sum(states[row].nbytes for row in range(12))
    assert f"({(1 + len(layers)) * H * states[0].itemsize:,} bytes a token" in printed
    assert f"{written / 2**30:.2f} GiB are to be written now" in printed
    assert not [path.name for path in tmp_path.iterdir() if path.is_dir()]


def test_a_run_that_breaks_or_has_parts_becomes_the_whole_which_is_left_alone(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(target, data, whole)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(ConfigError, match=r"GiB are to be written and 0.0 GiB are free"):
            run(target, data, parts, never)
    with pytest.raises(ConfigError, match=r"vLLM failed"):
        run(target, data, parts, Breaking)
    kept = {path: path.stat().st_mtime_ns for path in parts.glob("states-*")}
    assert 0 < len(kept) < len(StatesInfo.finished_shards(whole))
    with pytest.raises(ConfigError, match=r"shards are missing, states-0000\d.safetensors first"):
        stored(data, parts)
    for part in ("1/2", "2/2"):
        run(target, data, parts, part=part)
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    for shard in whole.glob("states-*"):
        assert (parts / shard.name).read_bytes() == shard.read_bytes()
    assert "0.00 GiB are to be written now" in run(target, data, parts, never)


class Broken(TransformersStates):
    """Its states are no finite numbers."""

    def states(self, texts: Iterable[tuple[int, list[int]]]) -> Iterator[tuple[int, Tensor]]:
        for row, states in super().states(texts):
            yield row, states / 0


def test_states_that_are_no_finite_numbers_are_refused(
    target: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"row \d+: .* expected are \[\d+, 128\] finite"):
        run(target, data, tmp_path, Broken, target_layers="none")


def test_a_folder_of_other_states_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    run(target, data, tmp_path)
    with pytest.raises(ConfigError, match=r"other settings.*max_length: 2048, not 10"):
        run(target, data, tmp_path, max_length=10)
    with pytest.raises(ConfigError, match=r"target_layers: \(1, 2\), not \(1,\)"):
        run(target, data, tmp_path, target_layers="1")
    before = StatesInfo.load(tmp_path)
    (tmp_path / "states.json").unlink()
    replace(before, text_fingerprint="another").save(tmp_path)
    with pytest.raises(ConfigError, match=r"text_fingerprint: 'another', not "):
        run(target, data, tmp_path)
