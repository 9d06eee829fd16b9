"""What was measured on a GPU: its tiles, and what its plans for parts are after.

`tiles/NAME.json`, where NAME is the GPU's, is a table that `benchmarks/tree_attention.py --tune`
wrote there. It is read once per process, when the first launch is planned, which is before an
engine captures its graphs. Where there is none, or a shape is not in it, the choices are those of
tree_attention_tiles.py and tree_attention_plan.py.

A tile's registers and shared memory depend on the compiler, so a table counts for the minor version
of Triton that it was measured with.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from vllm_redrafter.triton_kernels.tree_attention_plan import AIMS, PartAims
from vllm_redrafter.triton_kernels.tree_attention_tiles import (
    MAX_REGISTERS,
    NOT_TUNED,
    TILES,
    Tile,
    TileKey,
)
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.json_files import read_json

FOLDER = Path(__file__).parent / "tiles"
SIZES = (16, 32, 64, 128)
"""Rows and keys that a tile may have: a matrix instruction's fewest, and the most of a tree."""

WARPS = (1, 2, 4, 8)
MOST_STAGES = 8
FEWEST_REGISTERS = 24
REMEDY = "make it again with `benchmarks/tree_attention.py --tune`, or remove it"

# Without vLLM's init_logger, which is the engine's; it is the same logger.
logger = logging.getLogger("vllm.redrafter")


@dataclass(frozen=True)
class Tuning:
    """A GPU's own choices.

    Attributes:
        tiles: for `choose_tile`.
        aims: for `plan_split`.
    """

    tiles: Mapping[TileKey, Tile]
    aims: PartAims


UNTUNED = Tuning(NOT_TUNED, AIMS)


@cache
def tuning_of(device: torch.device) -> Tuning:
    """The device's, read when it is asked for first; UNTUNED for a CPU.

    Raises:
        ConfigError: see `read_tuning`.
    """
    if device.type != "cuda":
        return UNTUNED
    return read_tuning(torch.cuda.get_device_name(device), FOLDER)


def file_name(device_name: str) -> str:
    """Of the table of a GPU: `nvidia-h100-80gb-hbm3.json` for "NVIDIA H100 80GB HBM3"."""
    return re.sub("[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json"


def read_tuning(device_name: str, folder: Path) -> Tuning:
    """The table of GPUs of that name; UNTUNED where there is none, or it is another Triton's.

    Raises:
        ConfigError: the table cannot be read, is another GPU's, or has an entry that no launch
            could have; the message names file and entry.
    """
    path = folder / file_name(device_name)
    if not path.exists():
        return UNTUNED
    try:
        table = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; {REMEDY}") from error
    read = _Entry(path, "table", table)
    of = read.text("device")
    if file_name(of) != path.name:
        raise read.error(f"device {of!r} is not the one that the file is named after")
    tuning, version = Tuning(_tiles(read), _aims(read)), read.text("triton")
    if _minor(version) != _minor(triton.__version__):
        logger.warning(
            "%s is not used: it was measured with Triton %s, and %s is installed. To use it, %s.",
            path,
            version,
            triton.__version__,
            REMEDY,
        )
        return UNTUNED
    return tuning


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _tiles(table: _Entry) -> dict[TileKey, Tile]:
    found: dict[TileKey, Tile] = {}
    entries = table.value("tiles")
    if not isinstance(entries, list):
        raise table.error(f"tiles: expected a list, got {entries!r}")
    for index, content in enumerate(entries):
        entry = _Entry(table.path, f"tiles[{index}]", content)
        size = entry.integer("element_bytes"), entry.integer("head_dim")
        key = (*size, entry.integer("rows"))
        if key[2] not in [tile.rows for tile in TILES.get(size, ())]:
            raise entry.error(
                f"element_bytes, head_dim and rows are {key}, which takes no tile's place in TILES"
            )
        if key in found:
            raise entry.error(f"there is another with element_bytes, head_dim and rows {key}")
        tile = entry.inside("tile")
        registers = tile.value("max_registers")
        found[key] = Tile(
            rows=tile.integer("rows", SIZES),
            keys=tile.integer("keys", SIZES),
            num_warps=tile.integer("num_warps", WARPS),
            num_stages=tile.integer("num_stages", range(1, MOST_STAGES + 1)),
            max_registers=None
            if registers is None
            else tile.integer("max_registers", range(FEWEST_REGISTERS, MAX_REGISTERS + 1)),
        )
    return found


def _aims(table: _Entry) -> PartAims:
    """Those of the table, which a sweep that was cut short may not have come to."""
    if table.value("parts") is None:
        return AIMS
    aims = table.inside("parts").inside("aims")
    most = range(1, 2**20)
    return PartAims(**{field.name: aims.integer(field.name, most) for field in fields(PartAims)})


@dataclass(frozen=True)
class _Entry:
    """A part of a table: its file, what it is called there, and what it says."""

    path: Path
    name: str
    content: Any

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}: {self.name}: {problem}; {REMEDY}")

    def value(self, key: str) -> Any:
        if not isinstance(self.content, dict):
            raise self.error(f"expected a JSON object, got {self.content!r}")
        if key not in self.content:
            raise self.error(f"{key} is missing")
        return self.content[key]

    def inside(self, key: str) -> _Entry:
        return _Entry(self.path, f"{self.name}.{key}", self.value(key))

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            raise self.error(f"{key}: expected a text, got {value!r}")
        return value

    def integer(self, key: str, possible: range | tuple[int, ...] | None = None) -> int:
        """One of those that are possible; any if there is no such list."""
        value = self.value(key)
        if type(value) is not int:
            raise self.error(f"{key}: expected an integer, got {value!r}")
        if possible is not None and value not in possible:
            named = (
                f"{possible[0]} to {possible[-1]}"
                if isinstance(possible, range)
                else f"one of {', '.join(map(str, possible))}"
            )
            raise self.error(f"{key}: expected {named}, got {value}")
        return value
