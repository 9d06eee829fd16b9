# SPDX-License-Identifier: Apache-2.0
"""What docs/hostile-input.md lists is refused in one line, and no code in it runs."""

import json
import os
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from redrafter_testing.models.checkpoints import PROJECTED, edit_tensors
from redrafter_testing.own_commands import refusal_of
from vllm_redrafter.checkpoints.inspection import inspect_checkpoint
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.data.dataset import DatasetInfo, read_dataset, write_shard
from vllm_redrafter.data.hidden_states import StatesInfo, StoredStates
from vllm_redrafter.data.rows import Row
from vllm_redrafter.engine.request_options import check_request
from vllm_redrafter.engine.speculative_config import Request, request_of, validated
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.training.checkpointing import Checkpoints, RunProgress
from vllm_redrafter.utils.errors import ConfigError

TABLE = Path(__file__).parents[1] / "docs" / "hostile-input.md"
NAN, INF = float("nan"), float("inf")
NUMBERS = [10**400, -(10**400), 10**30, 2**64, NAN, INF, -INF, 1e308, -1]
REDUCED = RecurrentConfig(11, 4, exit_dim=6, num_draft_layers=2, rnn=True, draft_vocab_size=5)
INFO = DatasetInfo("target", "a", "b", None, "c", 4, 4, vocab_size=10)
ROW = Row(0, [1, 2, 3], [False, True, True])
TENSOR = "lm_head.2.weight"
FLAGS = ("revision", "spec_method", "spec_model", "spec_tokens", "tokenizer")
ARGUMENTS: dict[str, Any] = dict.fromkeys(FLAGS) | {"model": "target"}
RAN = "ran"
"""A file that the pickles' code makes, where it runs."""

Tried = Callable[[Path], object]


# --- What was made ---


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (RAN,)


def pickled(name: str) -> Tried:
    """A pickle in place of the weights."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save({"x": Evil()}, folder / name)

    return damage


def outside(folder: Path) -> None:
    """An index in place of the weights."""
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"x": "../../secret"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def content(name: str, change: Callable[[bytes], bytes]) -> Tried:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def text(name: str, content: str) -> Tried:
    return lambda folder: (folder / name).write_text(content)


def entry(name: str = "config.json", **values: Any) -> Tried:
    return content(name, lambda whole: json.dumps(json.loads(whole) | values).encode())


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Tried:
    return lambda folder: edit_tensors(
        folder, lambda tensors: tensors.update({n: change(t) for n, t in tensors.items()})
    )


def map_of(*values: Any, dtype: torch.dtype = torch.int64) -> Tried:
    def damage(folder: Path) -> None:
        save_drafter(RecurrentHead(REDUCED), folder)
        edit_tensors(folder, lambda tensors: tensors.update(d2t=torch.tensor(values, dtype=dtype)))

    return damage


def header(tensor: str, **entries: Any) -> Tried:
    """Entries of the header, for a tensor in it or not."""

    def change(whole: bytes) -> bytes:
        (length,) = struct.unpack("<Q", whole[:8])
        tensors = json.loads(whole[8 : 8 + length])
        tensors[tensor] = tensors.get(tensor, {}) | entries
        text = json.dumps(tensors).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    return content("model.safetensors", change)


def endless_map(folder: Path) -> None:
    """d2t of 2 GB, all of them a hole in the file."""
    save_drafter(RecurrentHead(REDUCED), folder)
    path, size = folder / "model.safetensors", 2 << 30
    edit_tensors(folder, lambda tensors: tensors.pop("d2t"))
    end = sum(tensor.nbytes for tensor in load_file(path).values())
    header("d2t", dtype="I64", shape=[size // 8], data_offsets=[end, end + size])(folder)
    os.truncate(path, path.stat().st_size + size)


# --- To what it was given ---


def damaged(folder: Path, damage: Tried) -> str:
    save_drafter(RecurrentHead(PROJECTED), folder / "drafter")
    damage(folder / "drafter")
    return str(folder / "drafter")


def checkpoint(command: str, damage: Tried) -> Tried:
    """A command on a drafter that was damaged."""

    def tried(folder: Path) -> None:
        more = [str(folder / "converted")] if command == "convert" else []
        run(command, damaged(folder, damage), *more)

    return tried


def served(damage: Tried = lambda folder: None, **speculative: Any) -> Tried:
    """The speculative config of `vllm serve`, with a drafter that was damaged."""

    def tried(folder: Path) -> None:
        given = {"model": damaged(folder, damage), "num_speculative_tokens": 4} | speculative
        asked = request_of(SimpleNamespace(**ARGUMENTS | {"speculative_config": given}))
        assert asked is not None
        validated(asked)

    return tried


def data(damage: Tried, row: Row = ROW) -> Tried:
    """`train --data` and whatever else reads data."""

    def tried(folder: Path) -> None:
        INFO.save(folder)
        write_shard(folder, 0, [row] * 50)
        damage(folder)
        read_dataset(folder)

    return tried


def resumed(damage: Tried) -> Tried:
    """`train --resume`."""

    def tried(folder: Path) -> None:
        drafter = RecurrentHead(PROJECTED)
        optimizer = torch.optim.AdamW(drafter.parameters())
        checkpoints = Checkpoints(folder)
        damage(checkpoints.save(drafter, optimizer.state_dict(), RunProgress(1, 2.0, {})))
        checkpoints.load(drafter, optimizer)

    return tried


def prompts(content: str) -> Tried:
    def tried(folder: Path) -> None:
        (folder / "prompts.jsonl").write_text(content)
        run("generate-data", ".", "--prompts=prompts.jsonl", "--output=data")

    return tried


def request(**extra_args: Any) -> Tried:
    return lambda folder: check_request(extra_args, 12)


def run(*arguments: str) -> None:
    """A command; what it says of an error is an error here."""
    raise ConfigError(refusal_of(*arguments).removeprefix("error: ").rstrip("\n"))


CASES: dict[str, Tried] = {
    "`pytorch_model.bin` with code in it": checkpoint("convert", pickled("pytorch_model.bin")),
    "a pickle named `model.safetensors`": checkpoint("inspect", pickled("model.safetensors")),
    "a pickle alone, to be served": served(pickled("pytorch_model.bin")),
    "`optimizer.pt` of a training checkpoint with code in it": resumed(pickled("optimizer.pt")),
    "`progress.json` of another step": resumed(
        text("progress.json", json.dumps(vars(RunProgress(2, 2.0, {}))))
    ),
    # A sparse file: it takes no place on the disk.
    "`config.json` of 1 GB": served(lambda folder: os.truncate(folder / "config.json", 1 << 30)),
    "`config.json` of 200,000 opening brackets": served(text("config.json", "[" * 200_000)),
    "`config.json` that holds a list": checkpoint("inspect", text("config.json", "[1]")),
    "an index whose shard is `../../secret`": checkpoint("convert", outside),
    "`vocab_size` −5": served(entry(vocab_size=-5)),
    "`hidden_size` NaN": served(entry(hidden_size=NAN)),
    "`exit_dim` of 10⁴⁰⁰": served(entry(exit_dim=10**400)),
    "`num_draft_layers` of a billion": served(entry(num_draft_layers=10**9)),
    '`rnn` "yes"': served(entry(rnn="yes")),
    "`d2t` past the vocabulary's end": served(map_of(0, 0, 0, 0, 9)),
    "`d2t` at the end of 64 bits": served(map_of(0, 2**63 - 1, 0, 0, 0)),
    "`d2t` that names a token twice": served(map_of(1, 0, 0, 0, 0)),
    "`d2t` of fractions": served(map_of(0, 0, 0, 0, 0, dtype=torch.float32)),
    "`d2t` of 2 GB": served(endless_map),
    "safetensors whose header claims 2⁶³ bytes": served(
        content("model.safetensors", lambda b: struct.pack("<Q", 2**63) + b[8:])
    ),
    "safetensors cut off": served(content("model.safetensors", lambda b: b[:-9])),
    "a tensor whose place is behind the file's end": served(
        header(TENSOR, data_offsets=[0, 10**9])
    ),
    "weights of float8 without scales": served(weights(lambda t: t.to(torch.float8_e4m3fn))),
    "`dataset.json` with `vocab_size` NaN": data(entry("dataset.json", vocab_size=NAN)),
    "a data shard cut in half": data(content("shard-00000.parquet", lambda b: b[: len(b) // 2])),
    "a row with a token behind the vocabulary's end": data(
        lambda folder: None, Row(0, [1, 10, 3], [False, True, True])
    ),
    "prompts of 200,000 opening brackets": prompts("[" * 200_000),
    "a prompt that ends within a character": prompts(r'{"prompt": "\ud83d"}'),
    "a speculative config that is a list": lambda folder: request_of(
        SimpleNamespace(speculative_config=[4])
    ),
    '`num_speculative_tokens` −1, NaN, "4" or 10⁴⁰⁰': served(num_speculative_tokens=NAN),
    "`beam_width` NaN": served(beam_width=NAN),
    "a `revision` that is a number": served(revision=5),
    "a request's `redrafter.spec_tokens` of NaN": request(**{"redrafter.spec_tokens": NAN}),
    'of "4", 2.5, true, a list, an object': request(**{"redrafter.spec_tokens": "4"}),
    "of 10⁴⁰⁰": request(**{"redrafter.spec_tokens": 10**400}),
    "an option of a request that there is not": request(**{"redrafter.beam_width": 4}),
    "`extra_args` that are a list": lambda folder: check_request([4], 12),
}


def documented() -> dict[str, str]:
    """By what was tried, what is said of it: parts of the message, with … between."""
    rows = (line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines())
    return {row[0]: row[-1] for row in rows if row[0] in CASES}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_one_line_that_the_document_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        CASES[name](tmp_path)
    message = str(refused.value)
    expected = ".*".join(map(re.escape, re.split(" ?… ?", documented()[name])))
    assert re.search(expected, message), message
    assert "\n" not in message and len(message) < 1000
    assert not (tmp_path / RAN).exists(), "code of the file ran"


def drafter_config(folder: Path) -> tuple[Path, Tried]:
    shape = {"num_speculative_tokens": 4, "beam_width": 2, "beam_length": 3}
    record = {"greedy": {"slope": 1.0, "biases": [0.0], "survival": [[0.5]]}}
    sizes = replace(REDUCED, selector=SelectorConfig(3, 2), target_layers=(2, 3))
    drafter = RecurrentHead(sizes)
    drafter.keep_tokens(torch.arange(5))
    save_drafter(drafter, folder, "target", shape, acceptance=record)

    def read(folder: Path) -> None:
        inspect_checkpoint(str(folder))
        validated(Request({"model": str(folder)}))

    return folder / "config.json", read


def data_info(folder: Path) -> tuple[Path, Tried]:
    INFO.save(folder)
    write_shard(folder, 0, [ROW] * 4)
    return folder / "dataset.json", read_dataset


def captured_info(folder: Path) -> tuple[Path, Tried]:
    StatesInfo("t", "a", "b", 3, 30, 10, 4, "float32", 20, (2, 3)).save(folder)
    for shard in (0, 1):
        (folder / f"states-{shard:05d}.safetensors").touch()
    return folder / "states.json", lambda folder: StoredStates(folder, np.array([10, 10, 10]))


def progress(folder: Path) -> tuple[Path, Tried]:
    drafter = RecurrentHead(PROJECTED)
    state = torch.optim.AdamW(drafter.parameters()).state_dict()
    made = Checkpoints(folder).save(drafter, state, RunProgress(1, 2.0, {"seed": 1}))

    def read(folder: Path) -> None:
        assert Checkpoints(folder).newest({"seed": 1}).step == 1

    return made / "progress.json", read


def places(values: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where numbers are in it."""
    if isinstance(values, int | float):
        yield place
    elif isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from places(value, (*place, key))


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: str(number)[:12])
@pytest.mark.parametrize("make", [drafter_config, data_info, captured_info, progress])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_any_number_of_a_file_may_be_this_one(
    make: Callable[[Path], tuple[Path, Tried]], number: float, tmp_path: Path
) -> None:
    file, read = make(tmp_path)
    whole = file.read_text()
    read(tmp_path)
    for *above, last in places(json.loads(whole)):
        values = json.loads(whole)
        reduce(getitem, above, values)[last] = number
        file.write_text(json.dumps(values) + "\n")
        with suppress(ConfigError):
            read(tmp_path)


def test_the_code_in_the_pickles_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps({"x": Evil()}))
    assert (tmp_path / RAN).exists()


def test_weights_that_are_no_numbers_are_refused_when_they_are_read(tmp_path: Path) -> None:
    save_drafter(RecurrentHead(PROJECTED), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors[TENSOR].__setitem__((0, 0), NAN))
    with pytest.raises(ConfigError, match=r"lm_head\.2\.weight holds NaN or infinity in float32"):
        load_drafter(str(tmp_path))
    edit_tensors(tmp_path, lambda tensors: tensors[TENSOR].__setitem__((0, 0), 1e6))
    assert load_drafter(str(tmp_path))
    with pytest.raises(ConfigError, match="NaN or infinity in float16; take another dtype"):
        load_drafter(str(tmp_path), torch.float16)


@pytest.mark.parametrize("target", [5, ["a"], NAN])
def test_a_target_that_is_no_name_is_refused(target: object, tmp_path: Path) -> None:
    save_drafter(RecurrentHead(PROJECTED), tmp_path)
    given = {"speculative_config": {"target": target}, "model": str(tmp_path)}
    with pytest.raises(ConfigError, match="'target' must be a name, got"):
        request_of(SimpleNamespace(**ARGUMENTS | given))


def test_the_document_lists_what_is_tried_here() -> None:
    assert list(documented()) == list(CASES)
