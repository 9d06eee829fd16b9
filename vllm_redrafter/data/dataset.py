# SPDX-License-Identifier: Apache-2.0
"""Training data on disk: a folder of Parquet shards with a description of how they were made.

```
DIR/
  dataset.json             DatasetInfo
  shard-00000.parquet      the rows of the conversations 0 to shard_size - 1
  shard-00001.parquet      and so on; a shard that exists is complete
  served.json              what the first server thought of a fixed text, where servers wrote them
```

Several processes may write it at once, each the shards of its part; see `parts.py`.

A row is a sequence of T tokens; a conversation may have several rows. The columns:

- `conversation`, int64: which of the prompts it came from, from 0;
- `input_ids`, T × int32: prompts and answers;
- `assistant_mask`, T × bool: True where the target wrote the token after just these tokens.
"""

from __future__ import annotations

import atexit
import errno
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, List, Value
from pyarrow import parquet

from vllm_redrafter.data.dataset_row import Row
from vllm_redrafter.data.folder_info import read_info, save_info
from vllm_redrafter.data.generation_settings import SamplingSettings
from vllm_redrafter.data.row_checks import ROWS_AT_ONCE, first_broken_row
from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.files import numbered_files, whole_file

FORMAT_VERSION = 1
INFO_FILE = "dataset.json"
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

    def save(self, folder: Path) -> None:
        """Write dataset.json, unless there is one."""
        path = folder / INFO_FILE
        with _full_disk_named(path):
            save_info(path, self)

    @classmethod
    def load(cls, folder: Path) -> DatasetInfo:
        """Read dataset.json.

        Raises:
            ConfigError: it is missing, malformed, or of another format version.
        """
        path = folder / INFO_FILE
        values = read_info(path, FORMAT_VERSION, "generate-data")
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


COLUMNS = Features(
    {
        "conversation": Value("int64"),
        "input_ids": List(Value("int32")),
        "assistant_mask": List(Value("bool")),
    }
)


def write_shard(folder: Path, shard: int, rows: Sequence[Row]) -> None:
    """Write a shard; it gets its name when all of it is on the disk.

    Args:
        folder: of the data.
        shard: its number.
        rows: all of its rows.

    Raises:
        ConfigError: the disk is full.
    """
    path = _shard_path(folder, shard)
    schema = COLUMNS.arrow_schema
    values = {name: [getattr(row, name) for row in rows] for name in schema.names}
    data = pa.Table.from_pydict(values, schema)
    with _full_disk_named(path), whole_file(path) as file:
        parquet.write_table(data, file)


def finished_shards(folder: Path) -> list[int]:
    """The numbers of the shards that are there, in order.

    Raises:
        ConfigError: a shard has a name that nobody gave it.
    """
    return numbered_files(folder, "shard-", ".parquet")


def read_dataset(folder: str | Path) -> tuple[DatasetInfo, Dataset]:
    """Read all shards, in order.

    The rows are mapped into memory from a temporary folder (`$TMPDIR`) that this process deletes
    when it ends.

    Raises:
        ConfigError: no dataset.json or one of another format version; a shard that is missing,
            damaged or of other data; no row, or one that is not what the columns promise; or the
            disk with the temporary folder is full.
    """
    folder = Path(folder).expanduser()
    info = DatasetInfo.load(folder)
    shards = finished_shards(folder)
    own = [shard for shard in shards if shard < info.num_shards]
    if missing := info.num_shards - len(own):
        first = next((place for place, shard in enumerate(own) if place != shard), len(own))
        raise ConfigError(
            f"{folder}: {missing} of {info.num_shards} shards are missing, "
            f"{_shard_path(folder, first).name} first: start generate-data again, with each "
            "--part of it, which writes them"
        )
    cache = tempfile.mkdtemp(prefix="vllm-redrafter-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    rows = Path(cache, "rows.arrow")
    schema = COLUMNS.arrow_schema
    # Not by `datasets`, for which names of files are patterns and addresses.
    try:
        with pa.OSFile(str(rows), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for shard in shards:
                for batch in _batches(folder, shard, info, schema):
                    writer.write_batch(batch)
    except OSError as error:
        raise ConfigError(
            f"{cache}: cannot be written to ({one_line(error)}): free some space, or name a "
            "folder with more of it in TMPDIR"
        ) from error
    data = Dataset.from_file(str(rows))
    if not len(data):
        raise ConfigError(
            f"{folder}: its {len(shards)} shards have no row: every prompt was too long for the "
            "target; generate data from shorter ones"
        )
    _check_rows(folder, info, data)
    return info, data


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.parquet"


def _batches(folder: Path, shard: int, info: DatasetInfo, schema: pa.Schema) -> Iterator[Any]:
    """A shard's rows."""
    path = _shard_path(folder, shard)
    again = "delete it and start generate-data again, which writes what is missing"
    own = info.conversations_of(shard)
    try:
        with parquet.ParquetFile(path) as file:
            if not file.schema_arrow.equals(schema):
                raise ConfigError(
                    f"{path}: has columns {file.schema_arrow.names} where {INFO_FILE} promises "
                    f"{schema.names} in the types of this format: it belongs to other data; {again}"
                )
            for batch in file.iter_batches(ROWS_AT_ONCE):
                numbers = batch.column("conversation").to_pylist()
                if others := [number for number in numbers if number not in own]:
                    raise ConfigError(
                        f"{path}: has conversation {others[0]}, which belongs into "
                        f"{_shard_path(folder, others[0] // info.shard_size).name}: it is a copy, "
                        f"or of other data; {again}"
                    )
                yield batch
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path}: not readable as Parquet ({one_line(error)}); {again}"
        ) from error


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
def _full_disk_named(path: Path) -> Iterator[None]:
    """Say of a full disk which file was to be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise ConfigError(
            f"{path}: the disk is full ({error.strerror}). Finished shards are kept: free some "
            "space and start the same command again to continue"
        ) from error
