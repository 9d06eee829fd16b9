"""Training data on disk: a folder of Parquet shards with a description of how they were made.

```
DIR/
  dataset.json             DatasetInfo
  shard-00000.parquet      the rows of the conversations 0 to shard_size - 1
  shard-00001.parquet      and so on; a shard that exists is complete
  served.json              what the first server thought of a fixed text, where servers wrote them
```

Several clients may write it at once; `leases.py` says who writes which shard.

A row is a sequence of T tokens; a conversation may have several rows. The columns:

- `conversation`, int64: which of the prompts it came from, from 0;
- `input_ids`, T × int32: prompts and answers;
- `assistant_mask`, T × bool: True where the target wrote the token after just these tokens.
"""

from __future__ import annotations

import atexit
import errno
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from datasets import (
    Dataset,
    Features,
    List,
    Value,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from datasets.exceptions import DatasetGenerationError

from vllm_redrafter.data.dataset_row import Row
from vllm_redrafter.data.generation_settings import SamplingSettings
from vllm_redrafter.data.row_checks import first_broken_row
from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.files import whole_file
from vllm_redrafter.utils.json_files import read_json

FORMAT_VERSION = 1
INFO_FILE = "dataset.json"
_SHARD_NAME = re.compile(r"shard-(\d{5,})\.parquet")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class DatasetInfo:
    """How a folder's data was made: dataset.json.

    Attributes:
        target: its folder or hub id, as it was given; only a name.
        target_fingerprint: of the model that wrote the data.
        tokenizer_fingerprint: of the tokenizer whose ids these are.
        template_fingerprint: of its chat template; None where the prompts are plain text.
        prompts_fingerprint: of the conversations.
        num_conversations: prompts asked for; some may have been too long for any row.
        shard_size: conversations per shard.
        vocab_size: of the target.
        system_prompt: for conversations without one of their own.
        sampling: how the tokens were drawn.
        format_version: of the folder.
    """

    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    template_fingerprint: str | None
    prompts_fingerprint: str
    num_conversations: int
    shard_size: int
    vocab_size: int
    system_prompt: str | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    format_version: int = FORMAT_VERSION

    @property
    def num_shards(self) -> int:
        return -(-self.num_conversations // self.shard_size)

    def conversations_of(self, shard: int) -> range:
        """The indices of a shard's conversations."""
        start = shard * self.shard_size
        return range(start, min(start + self.shard_size, self.num_conversations))

    def differences(self, other: DatasetInfo) -> list[str]:
        """`setting: own value, not the other's value` for all that the data depends on."""
        own, others = (_flat(info) for info in (self, other))
        return [
            f"{name}: {value!r}, not {others[name]!r}"
            for name, value in own.items()
            # The same files by another name are the same target.
            if name != "target" and value != others[name]
        ]

    def save(self, folder: Path, writer: str = "") -> None:
        """Write dataset.json, unless there is one.

        Args:
            folder: of the data.
            writer: a name of its own, where several clients begin at once.
        """
        with (
            suppress(FileExistsError),
            _whole_file(folder / INFO_FILE, writer, replace=False) as file,
        ):
            file.write((json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> DatasetInfo:
        """Read dataset.json.

        Raises:
            ConfigError: it is missing, malformed, or of another format version.
        """
        path = folder / INFO_FILE
        try:
            values = read_json(path)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{folder}: no {INFO_FILE} there; give a folder that generate-data wrote"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: not readable as JSON: {error}") from error
        found = values.get("format_version") if isinstance(values, dict) else None
        if found != FORMAT_VERSION:
            raise ConfigError(
                f"{path}: format version {found!r}, this version of vllm-redrafter reads "
                f"{FORMAT_VERSION}: generate the data again, or use the version that wrote it"
            )
        try:
            return cls(**{**values, "sampling": SamplingSettings(**values["sampling"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not what generate-data writes: {error}") from error

    def __post_init__(self) -> None:
        smallest = {"num_conversations": 0, "shard_size": 1, "vocab_size": 1}
        for name, least in smallest.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{INFO_FILE}: {name} must be an integer of at least {least}, got {value!r}"
                )


def _flat(info: DatasetInfo) -> dict[str, Any]:
    values = {f.name: getattr(info, f.name) for f in fields(info) if f.name != "sampling"}
    return {**values, **asdict(info.sampling)}


COLUMNS = Features(
    {
        "conversation": Value("int64"),
        "input_ids": List(Value("int32")),
        "assistant_mask": List(Value("bool")),
    }
)


def write_shard(folder: Path, shard: int, rows: Sequence[Row], writer: str = "") -> None:
    """Write a shard; it gets its name when all of it is on the disk. One that is there stays.

    Args:
        folder: of the data.
        shard: its number.
        rows: all of its rows.
        writer: a name of its own, where several clients write to the folder.

    Raises:
        ConfigError: the disk is full.
    """
    path = _shard_path(folder, shard)
    if path.exists():
        return
    values = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    data = Dataset.from_dict(values, features=COLUMNS)
    with (
        suppress(FileExistsError),
        _whole_file(path, writer, replace=False) as file,
        _no_progress_bars(),
    ):
        data.to_parquet(file, batch_size=max(len(rows), 1))


def remove_leftovers(folder: Path) -> None:
    """Remove half-written shards of killed clients, where all shards are finished."""
    for path in folder.glob(".shard-*.tmp"):
        path.unlink(missing_ok=True)


def finished_shards(folder: Path) -> list[int]:
    """The numbers of the shards that are there, in order."""
    names = (_SHARD_NAME.fullmatch(path.name) for path in folder.glob("shard-*.parquet"))
    return sorted(int(name.group(1)) for name in names if name)


def read_dataset(folder: str | Path) -> tuple[DatasetInfo, Dataset]:
    """Read the finished shards, in order; unfinished ones of a killed run are ignored.

    The rows are mapped into memory from a temporary folder (`$TMPDIR`) that this process deletes
    when it ends.

    Raises:
        ConfigError: no dataset.json or one of another format version, no finished shard, no row,
            a shard that is damaged, or a row that is not what the columns promise.
    """
    folder = Path(folder).expanduser()
    info = DatasetInfo.load(folder)
    paths = [_shard_path(folder, shard) for shard in finished_shards(folder)]
    if not paths:
        raise ConfigError(
            f"{folder}: no finished shard there; start generate-data again to finish some"
        )
    num_rows = sum(_check_shard(path) for path in paths)
    if not num_rows:
        raise ConfigError(
            f"{folder}: its {len(paths)} shards have no row: every prompt was too long for the "
            "target; generate data from shorter ones"
        )
    cache = tempfile.mkdtemp(prefix="vllm-redrafter-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    try:
        with _no_progress_bars():
            data = Dataset.from_parquet(
                [str(path) for path in paths], features=COLUMNS, cache_dir=cache
            )
    except DatasetGenerationError as error:
        raise _damaged(paths, error) from error
    _check_rows(folder, info, data)
    return info, data


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.parquet"


def _check_shard(path: Path) -> int:
    """The number of a shard's rows."""
    import pyarrow
    from pyarrow import parquet

    try:
        found = parquet.read_schema(path)
        num_rows: int = parquet.read_metadata(path).num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{path}: not readable as Parquet ({error}); delete it and start generate-data again, "
            "which writes what is missing"
        ) from error
    if not found.equals(COLUMNS.arrow_schema):
        raise ConfigError(
            f"{path}: has columns {found.names} where {INFO_FILE} promises {list(COLUMNS)} "
            "in the types of this format: it belongs to other data"
        )
    return num_rows


def _damaged(paths: Sequence[Path], error: Exception) -> ConfigError:
    """What to say of shards whose ends are whole, but not all of what is between."""
    import pyarrow
    from pyarrow import parquet

    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                for _ in file.iter_batches():
                    pass
        except (OSError, pyarrow.ArrowException) as cause:
            return ConfigError(
                f"{path}: not readable as Parquet ({one_line(cause)}); delete it and start "
                "generate-data again, which writes what is missing"
            )
    reason = one_line(error.__cause__ or error)
    return ConfigError(f"{paths[0].parent}: its shards cannot be read: {reason}")


def _check_rows(folder: Path, info: DatasetInfo, data: Dataset) -> None:
    found = first_broken_row(data.data.table, info.vocab_size)
    if found is None:
        return
    row, what = found
    conversation = data[row]["conversation"]
    raise ConfigError(
        f"{folder}: conversation {conversation}, in shard {conversation // info.shard_size}: "
        f"{what}; delete that shard and start generate-data again, which writes what is missing"
    )


@contextmanager
def _whole_file(path: Path, writer: str, replace: bool) -> Iterator[BinaryIO]:
    """`whole_file`, with a message for a full disk."""
    try:
        with whole_file(path, writer, replace) as file:
            yield file
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise ConfigError(
            f"{path}: the disk is full ({error.strerror}). Finished shards are kept: free some "
            "space and start the same command again to continue"
        ) from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """`datasets` would show a bar of its own for each file."""
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()
