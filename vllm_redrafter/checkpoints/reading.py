# SPDX-License-Identifier: Apache-2.0
"""Reading a drafter's checkpoint: config.json and model.safetensors of a folder or hub id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from vllm_redrafter.checkpoints.acceptance import PerSampling, acceptance_of
from vllm_redrafter.checkpoints.drafter_files import (
    CONFIG_FILE,
    UNREADABLE,
    read_config,
    weights_path,
)
from vllm_redrafter.checkpoints.tensors import (
    DRAFT_TO_TARGET,
    check_draft_vocabulary,
    check_tensors,
    own_names,
)
from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.heads.registry import build_head, head_config, heads, written_types
from vllm_redrafter.utils.errors import ConfigError, one_line

SHAPE_KEYS = {
    "num_speculative_tokens": "speculative_tokens",
    "beam_width": "beam_width",
    "beam_length": "beam_length",
    "candidates": "candidates",
}
"""Names of `ReDrafterConfig`, and those in a checkpoint's proposal method."""

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
DTYPES |= {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"}
"""Names of dtypes in a header of safetensors, and torch's; those that a drafter may have."""


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's checkpoint whose config.json, `values`, has been read: passed on for its name.

    `model` is a folder, or a hub repository's id with a `revision`.
    """

    model: str
    revision: str | None
    values: Mapping[str, Any]
    head: HeadConfig
    acceptance: PerSampling

    @classmethod
    def open(cls, model: str, revision: str | None = None) -> Checkpoint:
        """Read a config.json; a ConfigError where there is no ReDrafter's."""
        return cls.of(model, revision, read_config(model, revision))

    @classmethod
    def of(cls, model: str, revision: str | None, values: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint whose config.json has these values."""
        head = _head_of(model, values)
        try:
            return cls(model, revision, values, head, acceptance_of(values))
        except ConfigError as error:
            raise ConfigError(f"{model}: {error}") from error

    @cached_property
    def weights(self) -> Path:
        return weights_path(self.model, self.revision)

    def checked(self) -> Checkpoint:
        """This one, its tensors checked by name and shape; a ConfigError lists what is wrong."""
        path, head = self.weights, self.head
        try:
            with safe_open(path, framework="pt") as file:
                names = own_names(str(path), heads()[head.model_type], file.keys())
                headers = {own: file.get_slice(name) for own, name in names.items()}
                shapes = {own: header.get_shape() for own, header in headers.items()}
                dtypes = {
                    own: DTYPES.get(h.get_dtype(), h.get_dtype()) for own, h in headers.items()
                }
                check_tensors(str(path), head, shapes, dtypes)
                # Not before: a file may hold a map of any size.
                if head.draft_vocab_size is not None:
                    d2t = file.get_tensor(names[DRAFT_TO_TARGET])
                    check_draft_vocabulary(str(path), d2t, head.vocab_size)
        except UNREADABLE as error:
            raise ConfigError(f"{path}: not readable as safetensors: {one_line(error)}") from error
        return self

    def load(self, dtype: torch.dtype = torch.float32) -> DraftHead:
        """The drafter in a dtype, checked; a ConfigError where weights are NaN or infinite."""
        self.checked()
        drafter = build_drafter(self.head, load_file(self.weights), dtype)
        _check_finite(str(self.weights), drafter, dtype)
        return drafter


def _head_of(model: str, values: Mapping[str, Any]) -> HeadConfig:
    if not values:
        raise ConfigError(
            f"{model!r} has no {CONFIG_FILE}, or an empty one: give a ReDrafter checkpoint, or "
            "make one of the weights there with `vllm-redrafter convert`"
        )
    if values.get("model_type") not in heads():
        found = repr(values["model_type"]) if "model_type" in values else "none"
        raise ConfigError(
            f"{model!r} is not a ReDrafter checkpoint: its config.json must say "
            f'"model_type": {written_types()}, found {found}'
        )
    return head_config(values)


def load_drafter(
    model: str, dtype: torch.dtype = torch.float32, revision: str | None = None
) -> DraftHead:
    """Read a checkpoint, checked, of a folder or a hub id; the parameters get the dtype."""
    return Checkpoint.open(model, revision).load(dtype)


def _check_finite(where: str, drafter: DraftHead, dtype: torch.dtype) -> None:
    for name, weights in drafter.named_parameters():
        if not torch.stack(weights.aminmax()).isfinite().all():
            raise ConfigError(
                f"{where}: {name} holds NaN or infinity in {str(dtype).removeprefix('torch.')}; "
                "take another dtype, or a checkpoint from before the training went wrong"
            )


def build_drafter(
    config: HeadConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> DraftHead:
    """A drafter for inference of checked tensors by any of their names, in a dtype or their own."""
    with torch.device("meta"):
        drafter = build_head(config)
    own_name = heads()[config.model_type].own_name
    converted = {
        own_name(name): tensor.to(dtype) if tensor.is_floating_point() else tensor.long()
        for name, tensor in tensors.items()
    }
    drafter.load_state_dict(converted, assign=True)
    return drafter.eval().requires_grad_(False)


def verifier_of(config: Mapping[str, Any]) -> str | None:
    """The target that a config.json names under `speculators_config`, if it does."""
    entry: Any = config
    for key in ("speculators_config", "verifier", "name_or_path"):
        entry = entry.get(key) if isinstance(entry, Mapping) else None
    return entry if isinstance(entry, str) else None


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """How a config.json asks to be served, by the names of `ReDrafterConfig`; unchecked values.

    It is the first proposal method under `speculators_config`, as in the speculators library.
    """
    entry = config.get("speculators_config")
    methods = entry.get("proposal_methods") if isinstance(entry, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    if not isinstance(first, Mapping):
        return {}
    return {ours: first[theirs] for ours, theirs in SHAPE_KEYS.items() if theirs in first}
