# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter convert`: from every known form of a checkpoint to ours."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.checkpoints.acceptance import ENTRY
from vllm_redrafter.checkpoints.drafter_files import CARD_FILE, read_config, resolve_file
from vllm_redrafter.checkpoints.published_config import own_values
from vllm_redrafter.checkpoints.reading import build_drafter, head_of, shape_of, verifier_of
from vllm_redrafter.checkpoints.tensors import DRAFT_TO_TARGET, check_tensors, own_tensors
from vllm_redrafter.checkpoints.weight_files import find_weights, read_weights
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.heads.recurrent import RecurrentHead
from vllm_redrafter.heads.registry import build_head
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import whole_folder, writing

RECORDS = ("training", ENTRY)
"""Entries of config.json that stay as they are."""


@dataclass(frozen=True)
class _Source:
    config: HeadConfig
    tensors: dict[str, Tensor]
    verifier: str | None
    shape: dict[str, Any]
    records: dict[str, Any]
    notes: list[str]


def convert(
    source: str,
    destination: str | Path,
    target: str | None = None,
    draft_vocabulary: tuple[Tensor, int] | None = None,
) -> list[str]:
    """Write a checkpoint in our form; every number stays bit for bit.

    Args:
        source: folder or hub id; our tensor names, Apple's or TensorRT-LLM's, as safetensors or
            as pickled state dict, in one file or in shards.
        destination: folder to make; it appears when it is complete.
        target: its name; None keeps the source's.
        draft_vocabulary: the target's tokens that are ranked from now on, ascending int64, and of
            how many; None keeps the source's. Embeddings stay whole.

    Returns:
        Notes, a sentence each: files read, sizes taken from the tensors, and what was left out.
    """
    folder = _free_folder(destination)
    read = _read(source)
    if draft_vocabulary is not None:
        read = _ranking(source, read, *draft_vocabulary)
    drafter = build_drafter(read.config, read.tensors)
    card, note = _model_card(source)
    with writing(folder, "make room, or give another destination"), whole_folder(folder) as partial:
        save_drafter(drafter, partial, target or read.verifier, read.shape, **read.records)
        if card:
            shutil.copyfile(card, partial / CARD_FILE)
    return read.notes + note


def _sizes(
    where: str, head: type[DraftHead], values: Mapping[str, Any], shapes: Mapping[str, list[int]]
) -> tuple[HeadConfig, list[str]]:
    """The sizes by config.json, completed from the tensors; and a note for each of these."""
    by_tensors = head.sizes_from_tensors(where, shapes)
    stated = {name: values[name] for name in by_tensors if values.get(name) is not None}
    # 1 == True, but a size is no truth value.
    if wrong := [
        f"{name} is {value!r} in config.json, {by_tensors[name]!r} by the tensors"
        for name, value in stated.items()
        if value != by_tensors[name] or type(value) is not type(by_tensors[name])
    ]:
        raise ConfigError(f"{where} does not fit its config.json: {'; '.join(wrong)}")
    derived = {k: v for k, v in by_tensors.items() if v is not None and k not in stated}
    reduced = by_tensors.get("draft_vocab_size")
    if reduced and "vocab_size" not in by_tensors and values.get("vocab_size") is None:
        raise ConfigError(
            f"{where}: config.json must say vocab_size, the target's: d2t and a last layer of "
            f"{reduced} rows leave it open"
        )
    config = head.config_class.from_dict(
        {**{k: v for k, v in values.items() if v is not None}, **stated, **derived}
    )
    notes = [f"{k} = {v!r}: not in config.json, read off the tensors" for k, v in derived.items()]
    return config, notes


def _read(source: str) -> _Source:
    """Read and check everything, so that only a full disk can stop the writing."""
    values = own_values(read_config(source), source)
    # One that names none is read as the oldest, Apple's.
    head = RecurrentHead if values.get("model_type") is None else head_of(source, values)
    paths = find_weights(source)
    where = str(paths)
    tensors = own_tensors(where, head, values, read_weights(paths))
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    config, derived = _sizes(where, head, values, shapes)
    check_tensors(where, config, tensors)
    notes = [f"read {', '.join(path.name for path in paths)}", *derived]
    records = {entry: values[entry] for entry in RECORDS if values.get(entry) is not None}
    return _Source(config, tensors, verifier_of(values), shape_of(values), records, notes)


def _ranking(source: str, read: _Source, kept: Tensor, vocab_size: int) -> _Source:
    """Cut vocabulary-wide layers to the rows of some tokens."""
    config = read.config
    if config.draft_vocab_size is not None or config.vocab_size != vocab_size:
        raise ConfigError(
            f"{source!r} ranks {config.num_ranked_tokens} of {config.vocab_size} tokens, and the "
            f"data is of {vocab_size}: give a drafter that ranks all tokens, and text of its target"
        )
    with torch.device("meta"):
        head = build_head(config)
    layers = {head.layer_of(depth) for depth in range(config.max_beam_length or 1)}
    cut = [f"{name}.weight" for name, module in head.named_modules() if module in layers]
    tensors = read.tensors | {name: read.tensors[name][kept] for name in cut}
    tensors[DRAFT_TO_TARGET] = kept - torch.arange(len(kept))
    # What was measured is of the whole vocabulary.
    records = {entry: value for entry, value in read.records.items() if entry != ENTRY}
    config = replace(config, draft_vocab_size=len(kept))
    return replace(read, config=config, tensors=tensors, records=records)


def _model_card(source: str) -> tuple[Path | None, list[str]]:
    """A checkpoint's README.md, or a note that there is none."""
    try:
        return resolve_file(source, CARD_FILE), []
    except ConfigError as error:
        # The hub is out of reach, and its cache had the weights but no README.md.
        return None, [f"its {CARD_FILE} is left out: {error}"]


def _free_folder(destination: str | Path) -> Path:
    """The folder to write, with links followed."""
    folder = Path(destination).expanduser().resolve()
    if folder.is_dir() and not any(folder.iterdir()):
        return folder
    if folder.exists():
        what = "is not empty" if folder.is_dir() else "is a file"
        raise ConfigError(f"{folder} {what}: give another destination, or delete it first")
    return folder
