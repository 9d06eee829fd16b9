# SPDX-License-Identifier: Apache-2.0
"""`capture` without vLLM: what it writes, resumes, compares and refuses."""

import io
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
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
    target: Path, data: Path, output: Path, engine: type = TransformersStates, **settings: Any
) -> str:
    console = Console(file=io.StringIO(), width=200)
    capture(CaptureJob(str(target), data, output, CaptureSettings(**settings)), engine, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def stored(data: Path, output: Path) -> StoredStates:
    return StoredStates(output, row_lengths(read_dataset(data)[1]))


class Never:
    """An engine that must not be needed."""

    def __init__(self, *_: Any) -> None:
        pytest.fail("nothing is missing, and an engine was started")


class Breaking(TransformersStates):
    """Dies after nine rows."""

    def states(self, texts: Iterable[tuple[int, list[int]]]) -> Iterator[tuple[int, Tensor]]:
        for index, found in enumerate(super().states(texts)):
            if index == 9:
                raise ConfigError("vLLM failed while capturing")
            yield found


@pytest.mark.parametrize(("dtype", "layers"), [("auto", ()), ("bfloat16", ()), ("auto", (1,))])
def test_every_row_s_states_are_the_target_s_behind_the_norm(
    dtype: str, layers: tuple[int, ...], target: Path, data: Path, tmp_path: Path
) -> None:
    printed = run(target, data, tmp_path, dtype=dtype, target_layers=named_layers(layers))
    model = load_target(Target.open(target), dtype)
    states, dataset = stored(data, tmp_path), read_dataset(data)[1]
    for row, values in enumerate(dataset):
        tokens = torch.tensor([values["input_ids"][:-1]])
        with torch.no_grad():
            found = model.base_model(tokens, use_cache=False, output_hidden_states=True)
        others = [found.hidden_states[layer][0] for layer in layers]
        assert torch.equal(states[row], torch.cat([found.last_hidden_state[0], *others], 1)), row
    assert states.info.target_layers == layers
    assert states.info.num_rows == 12 and len(StatesInfo.finished_shards(tmp_path)) > 1
    written = sum(states[row].nbytes for row in range(12))
    assert f"({(1 + len(layers)) * H * states[0].itemsize:,} bytes a token" in printed
    assert f"{written / 2**30:.2f} GiB are to be written now" in printed
    assert "3 rows compared with transformers: at most 0.00%" in printed
    assert not [path.name for path in tmp_path.iterdir() if path.is_dir()]


def test_a_run_that_breaks_is_continued_and_a_whole_one_left_alone(
    target: Path, data: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(target, data, whole)
    with pytest.raises(ConfigError, match=r"vLLM failed"):
        run(target, data, broken, Breaking)
    kept = {path: path.stat().st_mtime_ns for path in broken.glob("states-*")}
    assert 0 < len(kept) < len(StatesInfo.finished_shards(whole))
    with pytest.raises(ConfigError, match=r"shards are missing, states-0000\d.safetensors first"):
        stored(data, broken)
    run(target, data, broken)
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    for shard in whole.glob("states-*"):
        assert (broken / shard.name).read_bytes() == shard.read_bytes()
    printed = run(target, data, broken, Never)
    assert "0.00 GiB are to be written now" in printed and "3 rows compared" in printed


def test_parts_together_are_the_whole(target: Path, data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(target, data, whole)
    first = run(target, data, parts, part="1/2")
    assert "other parts are missing still" in first
    assert StatesInfo.finished_shards(parts) == StatesInfo.finished_shards(whole)[::2]
    second = run(target, data, parts, part="2/2")
    assert "rows compared with transformers" in second
    for shard in whole.glob("states-*"):
        assert (parts / shard.name).read_bytes() == shard.read_bytes()


def test_rows_are_cut(target: Path, data: Path, tmp_path: Path) -> None:
    run(target, data, tmp_path, max_length=10)
    states, dataset = stored(data, tmp_path), read_dataset(data)[1]
    lengths = [len(values["input_ids"]) for values in dataset]
    assert max(lengths) > 10
    assert [len(states[row]) for row in range(12)] == [min(length, 10) - 1 for length in lengths]


def test_what_is_not_the_target_s_is_found(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Early(TransformersStates):
        """One layer too early."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            del self.model.base_model.layers[-1]

    with pytest.raises(TrainingError, match=r"row 0 is \d+\.\d% of its length from what transf"):
        run(target, data, tmp_path / "early", Early, target_layers="none")
    run(target, data, tmp_path / "unchecked", Early, target_layers="none", check_rows=0)

    class Broken(TransformersStates):
        def states(self, texts: Any) -> Iterator[tuple[int, Tensor]]:
            for row, states in super().states(texts):
                yield row, states / 0

    with pytest.raises(TrainingError, match=r"row \d+: .* expected are \[\d+, 128\] finite"):
        run(target, data, tmp_path / "broken", Broken, target_layers="none")


def test_a_layer_that_is_not_the_target_s_is_found(
    target: Path, data: Path, tmp_path: Path
) -> None:
    class Shifted(TransformersStates):
        """Right but for one of the layers besides, which is another one."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.layers[0] = 2

    with pytest.raises(TrainingError, match=r"row 0 is \d+\.\d% of its length from what transf"):
        run(target, data, tmp_path, Shifted, target_layers="1")


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


def test_a_disk_that_is_too_small_is_said_before_the_engine_starts(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"GiB are to be written and 0.0 GiB are free"):
        run(target, data, tmp_path, Never)
