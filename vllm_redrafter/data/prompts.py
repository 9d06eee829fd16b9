# SPDX-License-Identifier: Apache-2.0
"""Prompts for the target: from a file, or from a dataset of the Hugging Face hub."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from vllm_redrafter.data.conversation_rows import (
    Conversation,
    LeftOut,
    UnusableRow,
    conversation_of,
    shortened,
)
from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.json_files import parse_json

EXPECTED = (
    '{"prompt": "..."}, {"question": "..."}, '
    '{"messages": [{"role": "user", "content": "..."}, ...]}, '
    '{"conversations": [{"from": "human", "value": "..."}, ...]} or {"data": ["...", ...]}'
)

_NO_UTF_8 = "that are not UTF-8 text"

PlacedRow: TypeAlias = tuple[str, Any]
"""Its place, such as `prompts.jsonl, line 3`, and a row; an `UnusableRow` for one not readable."""


def read_prompts(source: str, split: str | None = None) -> tuple[list[Conversation], LeftOut]:
    """Read prompts for the target to answer, and which rows had to be left out.

    A file's ending gives its format: `.txt` (a line is a prompt), `.jsonl`, `.json` (a list) and
    `.parquet`, with rows of any form of `conversation_rows.py`. Other sources are the id of a
    dataset on the hub, or a folder that `datasets` can load; `split` is `train` by default.
    ConfigError: it cannot be read, or has no usable prompt at all.
    """
    usable, left_out = [], LeftOut()
    for at, row in _rows(source, split):
        try:
            usable.append(conversation_of(row, at))
        except UnusableRow as error:
            left_out.add(error)
    if not usable:
        raise ConfigError(
            f"{source}: no usable prompt among its {left_out.count} rows; "
            + "; ".join([*left_out.reasons(), f"expected {EXPECTED}"])
        )
    return usable, left_out


def _rows(source: str, split: str | None) -> Iterator[PlacedRow]:
    path = Path(source).expanduser()
    if path.is_dir():
        return _dataset_rows(str(path), split or "train")
    if not path.is_file():
        if path.suffix in READERS or source.startswith((".", "/", "~")):
            raise ConfigError(f"--prompts {source}: no such file or folder")
        return _dataset_rows(source, split or "train")
    if path.suffix not in READERS:
        raise ConfigError(f"{path}: unknown format {path.suffix!r}; expected {', '.join(READERS)}")
    if split is not None:
        raise ConfigError(
            f"--split {split} is for datasets, and --prompts {source} is a file: leave it out"
        )
    return READERS[path.suffix](path)


def _lines(path: Path) -> Iterator[tuple[str, str | UnusableRow]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            at = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                yield at, UnusableRow(at, _NO_UTF_8, f"expected UTF-8 text: {error}")
                continue
            if "\0" in text:
                yield at, UnusableRow(at, _NO_UTF_8, "expected UTF-8 text, found a byte of 0")
            elif text.strip():
                yield at, text


def _txt_rows(path: Path) -> Iterator[PlacedRow]:
    for at, text in _lines(path):
        yield at, {"prompt": text} if isinstance(text, str) else text


def _jsonl_rows(path: Path) -> Iterator[PlacedRow]:
    for at, row in _lines(path):
        if isinstance(row, str):
            try:
                yield at, parse_json(row)
                continue
            except ValueError as error:
                detail = f"not JSON ({error}), found {shortened(row)}"
                row = UnusableRow(at, "that are not JSON", detail)
        yield at, row


def _json_rows(path: Path) -> Iterator[PlacedRow]:
    try:
        rows = parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # malformed JSON or UTF-8; the former names the line
        raise ConfigError(f"{path}: not JSON: {error}; expected a list of {EXPECTED}") from error
    if not isinstance(rows, list):
        raise ConfigError(
            f"{path}: expected a list of rows, found {shortened(rows)}; "
            "one JSON object per line belongs into a file named .jsonl"
        )
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _parquet_rows(path: Path) -> Iterator[PlacedRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches())
            for number, row in enumerate(chain.from_iterable(batches), start=1):
                yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as Parquet: {error}") from error


def _dataset_rows(name: str, split: str) -> Iterator[PlacedRow]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    with tempfile.TemporaryDirectory(prefix="vllm-redrafter-") as temporary:
        given = name
        if Path(name).is_dir():
            # `datasets` takes a folder's name as a pattern or an address; this one is neither.
            given = f"{temporary}/dataset"
            shutil.copytree(Path(name).resolve(), given, copy_function=os.symlink)
        try:
            # Streaming: the rows are read once, and no copy of them stays in a cache.
            rows = load_dataset(given, split=split, streaming=True)
            for number, row in enumerate(rows, start=1):
                yield f"{name}, split {split}, row {number}", row
        except ConfigError:
            raise
        except (DatasetsError, OSError, ValueError) as error:
            reason = shortened(one_line(error).replace(given, name), 400, plain=True)
            raise ConfigError(
                f"--prompts {name}: neither a file nor a dataset that can be loaded with split "
                f"{split!r} (--split names another; files with other columns than the rest are "
                f"given one at a time): {reason}"
            ) from error


READERS: dict[str, Callable[[Path], Iterator[PlacedRow]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".txt": _txt_rows,
}
