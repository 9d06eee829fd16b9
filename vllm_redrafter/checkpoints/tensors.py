# SPDX-License-Identifier: Apache-2.0
"""The tensors of a drafter's checkpoint: their names, which others may spell differently, and their
shapes."""

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
    """From our names of tensors to those that a file gives them.

    Raises:
        ConfigError: the file has a tensor twice, under two of its names.
    """
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
    """Check that tensors are those of a drafter of these sizes, by what a file's header says.

    Args:
        where: what messages call them.
        config: the sizes.
        shapes: of all tensors, by own name.
        dtypes: likewise, by torch's names such as `bfloat16`.

    Raises:
        ConfigError: missing, misshapen or unknown tensors, or such of other dtypes; all of them
            listed.
    """
    with torch.device("meta"):
        expected = build_head(config).state_dict()
    _check_shapes(where, {name: list(t.shape) for name, t in expected.items()}, shapes)
    _check_dtypes(where, dtypes)


def check_draft_vocabulary(where: str, d2t: Tensor, vocab_size: int) -> None:
    """Check the map of a draft vocabulary.

    Args:
        where: what messages call its file.
        d2t: [draft vocabulary] of any integers; its shape and dtype have passed `check_tensors`.
        vocab_size: of the target.

    Raises:
        ConfigError: it points outside the target's vocabulary, or to a token twice.
    """
    tokens = torch.arange(len(d2t)) + d2t.long()
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise ConfigError(
            f"{where}: d2t points to token {int(outside[0])}, outside the target's vocabulary of "
            f"{vocab_size}: d2t[i] is the target's token minus i"
        )
    if len(torch.unique(tokens)) < len(tokens):
        raise ConfigError(f"{where}: d2t names a token of the target twice")


def _check_shapes(
    path: str, expected: Mapping[str, list[int]], found: Mapping[str, list[int]]
) -> None:
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unknown {name}" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])}, config.json asks for {want}"
        for name, want in expected.items()
        if name in found and list(found[name]) != want
    ]
    if problems:
        raise ConfigError(f"{path} does not fit its config.json: {'; '.join(problems)}")


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
