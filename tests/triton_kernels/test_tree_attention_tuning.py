"""A GPU's own tiles and aims: which file they are read from, and what is refused in it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from redrafter_testing.algorithm.tree_batches import bushy
from redrafter_testing.gpu.tree_attention_launch import Launch, Shape
from vllm_redrafter.triton_kernels import tree_attention as tree_attention_module
from vllm_redrafter.triton_kernels import tree_attention_tuning
from vllm_redrafter.triton_kernels.tree_attention_plan import AIMS, PartAims
from vllm_redrafter.triton_kernels.tree_attention_tiles import TILES, Tile, choose_tile
from vllm_redrafter.triton_kernels.tree_attention_tuning import (
    FOLDER,
    UNTUNED,
    Tuning,
    file_name,
    read_tuning,
    tuning_of,
)
from vllm_redrafter.utils.errors import ConfigError

GPU = "NVIDIA Imaginary 80GB HBM9"
TILE = Tile(rows=64, keys=128, num_warps=4, num_stages=3, max_registers=None)
OWN_AIMS = PartAims(programs_per_multiprocessor=3, min_keys=64, max_keys=512, long_context_parts=16)
TABLE: dict[str, Any] = {
    "device": GPU,
    "triton": triton.__version__,
    "tiles": [{"element_bytes": 2, "head_dim": 128, "rows": 32, "tile": asdict(TILE)}],
    "parts": {"aims": asdict(OWN_AIMS)},
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / file_name(GPU)
    path.write_text(json.dumps(TABLE | changes))
    return path


def test_a_file_is_named_after_the_gpu() -> None:
    assert file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3.json"
    assert (
        file_name("NVIDIA GeForce RTX 4090 (Laptop)/x") == "nvidia-geforce-rtx-4090-laptop-x.json"
    )


def test_tables_that_come_with_the_package_can_be_read() -> None:
    for path in FOLDER.glob("*.json"):
        device = json.loads(path.read_text())["device"]
        assert path.name == file_name(device)
        read_tuning(device, FOLDER)


def test_a_gpu_has_its_table_s_choices_and_others_the_usual_ones(tmp_path: Path) -> None:
    write(tmp_path)
    tuning = read_tuning(GPU, tmp_path)
    assert tuning == Tuning({(2, 128, 32): TILE}, OWN_AIMS)
    for rows in (17, 32):
        assert choose_tile(rows, 128, torch.float16, 90, tuning.tiles) == TILE
        assert choose_tile(rows, 96, torch.bfloat16, 0, tuning.tiles) == TILE
    for rows, head_dim, dtype in (
        (16, 128, torch.bfloat16),
        (33, 128, torch.bfloat16),
        (32, 64, torch.bfloat16),
        (32, 128, torch.float32),
    ):
        usual = choose_tile(rows, head_dim, dtype, 90)
        assert choose_tile(rows, head_dim, dtype, 90, tuning.tiles) == usual != TILE
    assert read_tuning("NVIDIA Imaginary 40GB", tmp_path) is UNTUNED


def test_rows_beyond_every_tile_have_the_one_in_the_place_of_theirs(tmp_path: Path) -> None:
    """132 rows are three tiles of 64, of which a GPU may have its own."""
    assert choose_tile(132, 128, torch.bfloat16).rows == 64
    assert choose_tile(132, 128, torch.bfloat16, 0, {(2, 128, 64): TILE}) is TILE


def test_a_sweep_that_was_cut_short_has_no_aims(tmp_path: Path) -> None:
    write(tmp_path, parts=None)
    assert read_tuning(GPU, tmp_path).aims == AIMS


@pytest.mark.parametrize(
    ("version", "counts"),
    [
        (triton.__version__, True),
        (".".join(triton.__version__.split(".")[:2]) + ".99", True),
        ("2.1.0", False),
    ],
)
def test_a_table_counts_for_the_triton_that_it_was_measured_with(
    version: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, triton=version)
    said: list[str] = []
    # Not caplog: vLLM's logging, once set up, keeps its loggers' messages to itself.
    monkeypatch.setattr(
        tree_attention_tuning.logger, "warning", lambda text, *values: said.append(text % values)
    )
    tuning = read_tuning(GPU, tmp_path)
    assert (tuning is not UNTUNED) == counts
    expected = f"{path} is not used: it was measured with Triton 2.1.0"
    assert [text.startswith(expected) for text in said] == ([] if counts else [True])


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("device"), "table: device is missing"),
        (lambda t: t.update(device="NVIDIA L4"), "device 'NVIDIA L4' is not the one that the file"),
        (lambda t: t.update(triton=3.6), "table: triton: expected a text, got 3.6"),
        (lambda t: t.update(tiles={}), "table: tiles: expected a list, got {}"),
        (lambda t: t.pop("parts"), "table: parts is missing"),
        (lambda t: t["tiles"].append(7), "tiles[1]: expected a JSON object, got 7"),
        (lambda t: t["tiles"].append(t["tiles"][0]), "tiles[1]: there is another with"),
        (lambda t: t["tiles"][0].update(rows="32"), "tiles[0]: rows: expected an integer"),
        (lambda t: t["tiles"][0].update(rows=48), "tiles[0]: element_bytes, head_dim and rows are"),
        (lambda t: t["tiles"][0].update(head_dim=80), "(2, 80, 32), which takes no tile's place"),
        (lambda t: t["tiles"][0].update(head_dim=256, rows=128), "takes no tile's place in TILES"),
        (lambda t: t["tiles"][0].pop("tile"), "tiles[0]: tile is missing"),
        (lambda t: t["tiles"][0]["tile"].update(keys=48), "keys: expected one of 16, 32, 64, 128"),
        (lambda t: t["tiles"][0]["tile"].update(num_warps=3), "num_warps: expected one of 1, 2,"),
        (lambda t: t["tiles"][0]["tile"].update(num_warps=True), "expected an integer, got True"),
        (lambda t: t["tiles"][0]["tile"].update(num_stages=0), "num_stages: expected 1 to 8"),
        (lambda t: t["tiles"][0]["tile"].update(max_registers=256), "expected 24 to 255, got 256"),
        (lambda t: t["tiles"][0]["tile"].pop("max_registers"), "max_registers is missing"),
        (lambda t: t["parts"].pop("aims"), "table.parts: aims is missing"),
        (lambda t: t["parts"]["aims"].update(min_keys=0), "table.parts.aims: min_keys: expected 1"),
    ],
)
def test_a_broken_table_is_an_error_that_names_file_and_entry(
    change: Change, message: str, tmp_path: Path
) -> None:
    # An error in any case: who has another Triton would not see it otherwise.
    table = copy.deepcopy(TABLE) | {"triton": "2.1.0"}
    change(table)
    path = tmp_path / file_name(GPU)
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as raised:
        read_tuning(GPU, tmp_path)
    said = str(raised.value)
    assert said.startswith(str(path)) and message in said
    assert "--tune`, or remove it" in said


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]"])
def test_what_is_no_table_is_an_error_too(text: str, tmp_path: Path) -> None:
    path = tmp_path / file_name(GPU)
    path.write_text(text)
    with pytest.raises(ConfigError, match="or remove it"):
        read_tuning(GPU, tmp_path)


@pytest.fixture
def gpu_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The table of this process's GPU, which has the imaginary one's name."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(tree_attention_tuning, "FOLDER", tmp_path)
    tuning_of.cache_clear()
    yield write(tmp_path)
    tuning_of.cache_clear()


def test_a_table_is_read_once(gpu_table: Path) -> None:
    device = torch.device("cuda", 0)
    assert tuning_of(device).tiles == {(2, 128, 32): TILE}
    gpu_table.write_text("broken meanwhile")
    assert tuning_of(torch.device("cuda", 0)) is tuning_of(device)
    assert tuning_of(torch.device("cpu")) is UNTUNED


def test_launches_have_the_device_s_tile_and_aims(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """9 nodes of 2 heads have 18 rows: two tiles of 16 in place of one of 32; parts of 9 keys."""
    batch = launch([(40, bushy(9))], Shape(kv_heads=1))
    usual = TILES[4, 64][1]
    own = Tile(16, 16, usual.num_warps, usual.num_stages, None)
    tuning = Tuning({(4, 64, usual.rows): own}, PartAims(programs_per_multiprocessor=4, min_keys=9))
    seen = []

    def tuned(device: torch.device) -> Tuning:
        seen.append(device)
        return tuning

    launches = []
    plan = tree_attention_module.TreeAttention._plan

    def planned(*args: Any) -> Any:
        launches.append(plan(*args))
        return launches[-1]

    monkeypatch.setattr(tree_attention_module, "tuning_of", tuned)
    monkeypatch.setattr(tree_attention_module.TreeAttention, "_plan", planned)
    batch.check()
    (made,) = launches
    assert made.tile == own and made.row_tiles == 2
    assert made.split.min_keys == 9 and made.split.parts > 1
    assert [device.type for device in seen] == [batch.device.type]
