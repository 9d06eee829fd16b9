# SPDX-License-Identifier: Apache-2.0
"""The tensors of a drafter's checkpoint: their names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.heads.registry import build_head
from vllm_redrafter.utils.errors import ConfigError

DRAFT_TO_TARGET = "d2t"
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def own_names(where: str, head: type[DraftHead], names: Iterable[str]) -> dict[str, str]:
    """From our names of tensors to a file's; a ConfigError where a file has one twice."""
    found: dict[str, str] = {}
    for name in names:
        own = head.own_name(name)
        if own in found:
            raise ConfigError(f"{where}: {found[own]} and {name} are the same tensor; keep one")
        found[own] = name
    return found


def check_tensors(
    where: str,
    config: HeadConfig,
    shapes: Mapping[str, list[int]],
    dtypes: Mapping[str, str],
) -> None:
    """Check a file's header against a drafter's sizes; a ConfigError lists all differences.

    `shapes` and `dtypes`, by torch's names such as `bfloat16`, are those of all tensors by our
    names. `where` is what messages call the file.
    """
    with torch.device("meta"):
        expected = {name: list(t.shape) for name, t in build_head(config).state_dict().items()}
    problems = [f"missing {name}" for name in expected if name not in shapes]
    problems += [f"unknown {name}" for name in shapes if name not in expected]
    problems += [
        f"{name} has shape {list(shapes[name])}, config.json asks for {want}"
        for name, want in expected.items()
        if name in shapes and list(shapes[name]) != want
    ]
    if problems:
        raise ConfigError(f"{where} does not fit its config.json: {'; '.join(problems)}")
    _check_dtypes(where, dtypes)


def check_draft_vocabulary(where: str, d2t: Tensor, vocab_size: int) -> None:
    """Check that d2t, which has passed `check_tensors`, names tokens of the target once each."""
    tokens = torch.arange(len(d2t)) + d2t.long()
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise ConfigError(
            f"{where}: d2t points to token {int(outside[0])}, outside the target's vocabulary of "
            f"{vocab_size}: d2t[i] is the target's token minus i"
        )
    if len(torch.unique(tokens)) < len(tokens):
        raise ConfigError(f"{where}: d2t names a token of the target twice")


def _check_dtypes(path: str, found: Mapping[str, str]) -> None:
    if found.get(DRAFT_TO_TARGET, _INTEGERS[0]) not in _INTEGERS:
        raise ConfigError(f"{path}: d2t must hold integers, has {found[DRAFT_TO_TARGET]}")
    if wrong := [
        f"{name} is {dtype}"
        for name, dtype in found.items()
        if name != DRAFT_TO_TARGET and dtype not in _FLOATS
    ]:
        raise ConfigError(
            f"{path}: weights must be {', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}, but "
            f"{'; '.join(wrong)}: take the checkpoint as it was before it was quantised"
        )
