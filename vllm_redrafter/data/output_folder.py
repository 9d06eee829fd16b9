# SPDX-License-Identifier: Apache-2.0
"""A folder of numbered shards with a description, which several processes may write at once."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import lock, numbered_files, whole_file, write_once, writing
from vllm_redrafter.utils.json_files import read_object

FORMAT_VERSION = 1
KEPT = "finished shards are kept: make room and start the same command again to continue"


@dataclass(frozen=True)
class Part:
    """The k-th of n processes that write shards into one folder: `--part k/n`."""

    k: int
    n: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `k/n`; ConfigError where it is something else, or k is not from 1 to n."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        part = cls(int(found[1]), int(found[2])) if found else cls(0, 0)
        if not 1 <= part.k <= part.n:
            raise ConfigError(f"--part must be k/n with k from 1 to n, such as 2/8; got {text!r}")
        return part

    def shards(self, total: int) -> range:
        return range(self.k - 1, total, self.n)


class FolderInfo:
    """Base of dataclasses that describe a folder's shards, in a JSON file among them."""

    FILE: ClassVar[str]
    COMMAND: ClassVar[str]
    """What writes such folders."""
    SHARD: ClassVar[tuple[str, str]]
    """What stands before and after a shard's number in its name."""

    @classmethod
    def shard_path(cls, folder: Path, shard: int) -> Path:
        before, after = cls.SHARD
        return folder / f"{before}{shard:05d}{after}"

    @classmethod
    def finished_shards(cls, folder: Path) -> list[int]:
        """The numbers of the shards that are there, in order; a shard that exists is complete."""
        return numbered_files(folder, *cls.SHARD)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the description; ConfigError where it is missing or is none of this version."""
        path = folder / cls.FILE
        if not path.exists():
            raise ConfigError(
                f"{folder}: no {cls.FILE} there; give a folder that {cls.COMMAND} wrote"
            )
        values = read_object(path)
        if (version := values.get("format_version")) != FORMAT_VERSION:
            raise ConfigError(
                f"{path}: format version {version!r}, this version of vllm-redrafter reads "
                f"{FORMAT_VERSION}: start {cls.COMMAND} again with another folder, or use the "
                "version that wrote it"
            )
        try:
            return cls(**cls._from_json(values))
        except (ConfigError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not what {cls.COMMAND} writes: {error}") from error

    @classmethod
    def _from_json(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The fields' values; JSON has neither tuples nor dataclasses."""
        return values

    def _check_integers(self, **smallest: int) -> None:
        for name, least in smallest.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**63:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")

    def save(self, folder: Path) -> None:
        """Write the description, unless there is one."""
        text = json.dumps(asdict(self), indent=2) + "\n"  # type: ignore[call-overload]  # a dataclass
        with writing(folder / self.FILE, KEPT):
            write_once(folder / self.FILE, text.encode())

    @contextmanager
    def missing_shards(self, output: Path, part: Part, total: int) -> Iterator[list[int]]:
        """The shards that a part has still to write; it is locked meanwhile.

        A new folder is described first. A complete one is only read. ConfigError: the folder holds
        something else, or another process writes the part.
        """
        own = part.shards(total)
        if (output / self.FILE).exists() and not self._unfinished(output, own):
            yield []
            return
        with _locked(output, part):
            if not (output / self.FILE).exists() and self.finished_shards(output):
                raise ConfigError(
                    f"--output {output} holds shards without a {self.FILE} that says what they "
                    "are: give another folder, or delete this one"
                )
            self.save(output)
            yield self._unfinished(output, own)

    def _unfinished(self, output: Path, shards: Sequence[int]) -> list[int]:
        check_same(output, _flat(self.load(output)), _flat(self))
        return sorted(set(shards).difference(self.finished_shards(output)))


@contextmanager
def _locked(folder: Path, part: Part) -> Iterator[None]:
    """Keep other processes from writing this part, or parts of another number."""
    with writing(f"--output {folder}", "give another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f".part-{part.k}-of-{part.n}.lock").open("w")
    busy = f"--output {folder}: another process is writing part"
    with file:
        lock(file, f"{busy} {part.k}/{part.n}; wait for it to end, or give each its own --part")
        for other in folder.glob(".part-*-of-*.lock"):
            k, n = map(int, re.findall(r"\d+", other.name))
            if n != part.n:  # their shards are others
                with other.open("a") as held:
                    lock(held, f"{busy} {k}/{n}; give all the same number of parts")
        yield


@contextmanager
def shard_file(path: Path) -> Iterator[BinaryIO]:
    """A shard to write; it gets its name when all of it is on the disk. ConfigError: disk full."""
    with writing(path, KEPT), whole_file(path) as file:
        yield file


def check_same(output: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse to continue what was made with the settings `found` with other settings `own`."""
    different = [name for name in own if name != "target" and own[name] != found.get(name)]
    if different:
        each = [f"{name}: {found.get(name)!r}, not {own[name]!r}" for name in different]
        raise ConfigError(
            f"--output {output} was made with other settings, which cannot be continued with "
            f"these: {'; '.join(each)}. Give the former settings or another --output"
        )


def _flat(info: Any) -> dict[str, Any]:
    """All fields, and those of fields that have some."""
    values: dict[str, Any] = {}
    for name, value in asdict(info).items():
        values.update(value if isinstance(value, dict) else {name: value})
    return values
