# SPDX-License-Identifier: Apache-2.0
"""The tensors of a drafter's checkpoint: their names, shapes and dtypes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.heads.registry import build_head
from vllm_redrafter.utils.errors import ConfigError

DRAFT_TO_TARGET = "d2t"
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def own_tensors(
    where: str, head: type[DraftHead], values: Mapping[str, Any], loaded: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A file's tensors by our names; `values` are config.json's.

    A ConfigError where tensors under several names are not the one that they should be.
    """
    found: dict[str, dict[int, str]] = {}
    for name, tensor in loaded.items():
        own, part = head.own_part(name, values)
        parts = found.setdefault(own, {})
        like = loaded[parts.setdefault(part, name)]
        is_same = tensor is like or (tensor.dtype == like.dtype and torch.equal(tensor, like))
        if not is_same or tensor.shape != loaded[next(iter(parts.values()))].shape:
            raise ConfigError(
                f"{where}: {', '.join(dict.fromkeys([*parts.values(), name]))} are one tensor, "
                f"{own}, and differ: take the checkpoint as it was published, or keep the right one"
            )
    return {
        own: _joined([loaded[parts[part]] for part in sorted(parts)])
        for own, parts in found.items()
    }


def _joined(parts: Sequence[Tensor]) -> Tensor:
    rows = parts[0].shape or (1,)
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(rows) for part in parts])


def check_tensors(where: str, config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Check a file's tensors against a drafter's sizes; a ConfigError lists all differences.

    `where` is what messages call the file.
    """
    with torch.device("meta"):
        expected = {name: list(t.shape) for name, t in build_head(config).state_dict().items()}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"missing {name}" for name in expected if name not in shapes]
    problems += [f"unknown {name}" for name in shapes if name not in expected]
    problems += [
        f"{name} has shape {shapes[name]}, config.json asks for {want}"
        for name, want in expected.items()
        if name in shapes and shapes[name] != want
    ]
    if problems:
        raise ConfigError(f"{where} does not fit its config.json: {'; '.join(problems)}")
    _check_dtypes(where, tensors)
    if config.draft_vocab_size is not None:
        _check_draft_vocabulary(where, tensors[DRAFT_TO_TARGET], config.vocab_size)


def _check_draft_vocabulary(where: str, d2t: Tensor, vocab_size: int) -> None:
    """Check that d2t names tokens of the target once each."""
    tokens = torch.arange(len(d2t)) + d2t.long()
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise ConfigError(
            f"{where}: d2t points to token {int(outside[0])}, outside the target's vocabulary of "
            f"{vocab_size}: d2t[i] is the target's token minus i"
        )
    if len(torch.unique(tokens)) < len(tokens):
        raise ConfigError(f"{where}: d2t names a token of the target twice")


def _check_dtypes(path: str, tensors: Mapping[str, Tensor]) -> None:
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    if (of_map := dtypes.pop(DRAFT_TO_TARGET, _INTEGERS[0])) not in _INTEGERS:
        raise ConfigError(f"{path}: d2t must hold integers, has {of_map}")
    if wrong := [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in _FLOATS]:
        raise ConfigError(
            f"{path}: weights must be {', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}, but "
            f"{'; '.join(wrong)}: take the checkpoint as it was before it was quantised"
        )
