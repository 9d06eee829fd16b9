# SPDX-License-Identifier: Apache-2.0
"""Training data on disk: a folder of Parquet shards with a description of how they were made.

```
DIR/
  dataset.json             DatasetInfo
  shard-00000.parquet      the rows of the first conversations; a shard that exists is complete
```

A row is a sequence of T tokens; a conversation may have several rows. The columns:

- `conversation`, int64: which of the prompts it came from, from 0;
- `input_ids`, T × int32: prompts and answers;
- `assistant_mask`, T × bool: True where the target wrote the token after just these tokens.
"""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value
from pyarrow import parquet

from vllm_redrafter.data.output_folder import FORMAT_VERSION, FolderInfo, shard_file
from vllm_redrafter.data.rows import Row
from vllm_redrafter.data.settings import SamplingSettings
from vllm_redrafter.utils.errors import ConfigError, one_line

ROWS_AT_ONCE = 1000
COLUMNS = Features(
    {
        "conversation": Value("int64"),
        "input_ids": List(Value("int32")),
        "assistant_mask": List(Value("bool")),
    }
)


@dataclass(frozen=True)
class DatasetInfo(FolderInfo):
    """How a folder's data was made: dataset.json.

    Attributes:
        template_fingerprint: of the chat template; None where the prompts are plain text.
        num_conversations: prompts asked for; some may have been too long for any row.
        shard_size: conversations per shard.
    """

    FILE, COMMAND, SHARD = "dataset.json", "generate-data", ("shard-", ".parquet")

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

    def __post_init__(self) -> None:
        self._check_integers(num_conversations=0, shard_size=1, vocab_size=1)

    @classmethod
    def _from_json(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "sampling": SamplingSettings(**values["sampling"])}

    @property
    def num_shards(self) -> int:
        return -(-self.num_conversations // self.shard_size)

    def conversations_of(self, shard: int) -> range:
        start = shard * self.shard_size
        return range(start, min(start + self.shard_size, self.num_conversations))


def write_shard(folder: Path, shard: int, rows: Sequence[Row]) -> None:
    """Write a shard with all of its rows; ConfigError where it cannot be written."""
    schema = COLUMNS.arrow_schema
    values = {name: [getattr(row, name) for row in rows] for name in schema.names}
    with shard_file(DatasetInfo.shard_path(folder, shard)) as file:
        parquet.write_table(pa.Table.from_pydict(values, schema), file)


def read_dataset(folder: str | Path) -> tuple[DatasetInfo, Dataset]:
    """Read all shards, in order.

    The rows are mapped into memory from a temporary folder (`$TMPDIR`) that goes away with the
    process. ConfigError: shards that are missing, damaged or of other data; no row, or a broken
    one; disk full.
    """
    folder = Path(folder).expanduser()
    info = DatasetInfo.load(folder)
    shards = info.finished_shards(folder)
    if missing := sorted(set(range(info.num_shards)).difference(shards)):
        raise ConfigError(
            f"{folder}: {len(missing)} of {info.num_shards} shards are missing, "
            f"{info.shard_path(folder, missing[0]).name} first: start generate-data again, with "
            "each --part of it, which writes them"
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
    if broken := first_broken_row(data, info.vocab_size):
        conversation = data[broken[0]]["conversation"]
        raise ConfigError(
            f"{folder}: conversation {conversation}, in shard {conversation // info.shard_size}: "
            f"{broken[1]}; delete that shard and start generate-data again, which writes what is "
            "missing"
        )
    return info, data


def first_broken_row(data: Any, vocab_size: int) -> tuple[int, str] | None:
    """The first row that is not what the columns promise: its number, and what is wrong with it.

    Later code indexes without a check. The `datasets.Dataset` may be larger than the memory.
    """
    start = 0
    for batch in data.data.table.to_batches(max_chunksize=ROWS_AT_ONCE):
        findings = [
            (_lengths_differ(batch), "input_ids and assistant_mask differ in length"),
            (
                _tokens_outside(batch, vocab_size),
                f"a token id is outside the target's vocabulary of {vocab_size}",
            ),
        ]
        broken = [(start + int(rows.argmax()), what) for rows, what in findings if rows.any()]
        if broken:
            return min(broken)
        start += batch.num_rows
    return None


def _lengths_differ(batch: Any) -> Any:
    """[rows] bool; a missing list has length −1."""
    ids, mask = (
        pc.fill_null(pc.list_value_length(batch.column(name)), -1).to_numpy(zero_copy_only=False)
        for name in ("input_ids", "assistant_mask")
    )
    return ids != mask


def _tokens_outside(batch: Any, vocab_size: int) -> Any:
    """[rows] bool."""
    column = batch.column("input_ids")
    tokens = pc.fill_null(column.flatten().cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    outside = (tokens < 0) | (tokens >= vocab_size)
    rows = np.zeros(len(column), dtype=bool)
    # Only where there is one are the tokens' rows looked up: almost always there is none.
    if outside.any():
        rows[pc.list_parent_indices(column).to_numpy(zero_copy_only=False)[outside]] = True
    return rows


def _batches(folder: Path, shard: int, info: DatasetInfo, schema: pa.Schema) -> Iterator[Any]:
    path = info.shard_path(folder, shard)
    again = "delete it and start generate-data again, which writes what is missing"
    own = info.conversations_of(shard)
    try:
        with parquet.ParquetFile(path) as file:
            if not file.schema_arrow.equals(schema):
                raise ConfigError(
                    f"{path}: has columns {file.schema_arrow.names} where {info.FILE} promises "
                    f"{schema.names} in the types of this format: it belongs to other data; {again}"
                )
            for batch in file.iter_batches(ROWS_AT_ONCE):
                numbers = batch.column("conversation").to_pylist()
                if others := [number for number in numbers if number not in own]:
                    raise ConfigError(
                        f"{path}: has conversation {others[0]}, which belongs into "
                        f"{info.shard_path(folder, others[0] // info.shard_size).name}: it is a "
                        f"copy, or of other data; {again}"
                    )
                yield batch
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path}: not readable as Parquet ({one_line(error)}); {again}"
        ) from error
