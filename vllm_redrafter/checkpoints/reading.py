"""Reading a drafter's checkpoint: a folder, or a hub repository, with config.json and
model.safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from vllm_redrafter.checkpoints.acceptance_record import ByKind, acceptance_of
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
from vllm_redrafter.heads.registry import (
    build_head,
    foreign_head,
    head_class,
    head_config,
    is_head,
    written_types,
)
from vllm_redrafter.utils.errors import ConfigError, one_line

SHAPE_KEYS = {
    "num_speculative_tokens": "speculative_tokens",
    "beam_width": "beam_width",
    "beam_length": "beam_length",
    "candidates": "candidates",
}
"""Names of `ReDrafterConfig`, and those in a checkpoint's proposal method."""

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
}
"""Names of dtypes in a header of safetensors, and torch's; those that a drafter may have."""


def is_redrafter(config: Mapping[str, Any]) -> bool:
    """Does this config.json belong to a ReDrafter checkpoint?"""
    return is_head(config.get("model_type"))


def load_config(model: str, revision: str | None = None) -> HeadConfig:
    """The drafter's sizes.

    Raises:
        ConfigError: no such checkpoint, or not a ReDrafter's.
    """
    values = read_config(model, revision)
    if not values:
        raise ConfigError(
            f"{model!r} has no {CONFIG_FILE}, or an empty one: give a ReDrafter checkpoint, or "
            "make one of the weights there with `vllm-redrafter convert`"
        )
    if (others := foreign_head(values)) is not None:
        return others.config_class.from_dict(others.from_foreign_config(values))
    if not is_redrafter(values):
        found = repr(values["model_type"]) if "model_type" in values else "none"
        raise ConfigError(
            f"{model!r} is not a ReDrafter checkpoint: its config.json must say "
            f'"model_type": {written_types()}, found {found}'
        )
    return head_config(values)


@contextmanager
def _convertible(model: str) -> Iterator[None]:
    """What is wrong with another program's checkpoint, `convert` may mend."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"{error}; `vllm-redrafter convert {model} FOLDER` reads all forms of such a "
            "checkpoint, and writes one that is served"
        ) from error


def check_checkpoint(model: str, revision: str | None = None) -> HeadConfig:
    """Check a checkpoint's tensors by name and shape, without reading them.

    Raises:
        ConfigError: see `load_drafter`.
    """
    if foreign_head(read_config(model, revision)) is None:
        return _checked(model, revision)
    with _convertible(model):
        return _checked(model, revision)


def _checked(model: str, revision: str | None) -> HeadConfig:
    config = load_config(model, revision)
    recorded_acceptance(model, revision)
    path = weights_path(model, revision)
    try:
        with safe_open(path, framework="pt") as file:
            names = own_names(str(path), head_class(config), file.keys())
            headers = {own: file.get_slice(name) for own, name in names.items()}
            shapes = {own: header.get_shape() for own, header in headers.items()}
            dtypes = {own: DTYPES.get(h.get_dtype(), h.get_dtype()) for own, h in headers.items()}
            check_tensors(str(path), config, shapes, dtypes)
            # Not before: a file may hold a map of any size.
            if config.draft_vocab_size is not None:
                d2t = file.get_tensor(names[DRAFT_TO_TARGET])
                check_draft_vocabulary(str(path), d2t, config.vocab_size)
    except UNREADABLE as error:
        raise ConfigError(f"{path}: not readable as safetensors: {one_line(error)}") from error
    return config


def recorded_acceptance(model: str, revision: str | None = None) -> ByKind:
    """How its nodes were accepted where it was measured.

    Raises:
        ConfigError: the record is broken.
    """
    try:
        return acceptance_of(read_config(model, revision))
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}") from error


def load_drafter(
    model: str, dtype: torch.dtype = torch.float32, revision: str | None = None
) -> DraftHead:
    """Read a checkpoint and check every tensor's name and shape.

    Args:
        model: a folder, or a hub repository's id.
        dtype: of the returned parameters.
        revision: of the hub repository.

    Raises:
        ConfigError: missing, misshapen or unknown tensors, all of them listed; or weights that
            are no numbers.
    """
    config = check_checkpoint(model, revision)
    path = weights_path(model, revision)
    drafter = build_drafter(config, load_file(path), dtype)
    _check_finite(str(path), drafter, dtype)
    return drafter


def _check_finite(where: str, drafter: DraftHead, dtype: torch.dtype) -> None:
    """Refuse weights with which every draft would be nonsense."""
    for name, weights in drafter.named_parameters():
        if not torch.stack(weights.aminmax()).isfinite().all():
            raise ConfigError(
                f"{where}: {name} holds NaN or infinity in {str(dtype).removeprefix('torch.')}; "
                "take another dtype, or a checkpoint from before the training went wrong"
            )


def build_drafter(
    config: HeadConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> DraftHead:
    """A drafter for inference of these tensors; they are kept, not copied, where dtypes agree.

    Args:
        config: its sizes.
        tensors: by any of their names; they have passed `check_tensors`.
        dtype: of the parameters; None for the tensors' own.
    """
    with torch.device("meta"):
        drafter = build_head(config)
    own_name = head_class(config).own_name
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
    """How a checkpoint's config.json asks to be served, where it does.

    It stands under `speculators_config`, as in checkpoints of the speculators library; the first
    proposal method counts.

    Returns:
        By the names of `ReDrafterConfig`, as they are written: nobody has checked the values.
    """
    entry = config.get("speculators_config")
    methods = entry.get("proposal_methods") if isinstance(entry, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    if not isinstance(first, Mapping):
        return {}
    return {ours: first[theirs] for ours, theirs in SHAPE_KEYS.items() if theirs in first}


def proposal_of(shape: Mapping[str, Any], head: HeadConfig) -> dict[str, Any]:
    """The way back: entries of a proposal method.

    Args:
        shape: by the names of `ReDrafterConfig`; what is no part of a shape is left out.
        head: the drafter's sizes; without candidates to tell, none are recorded.
    """
    entries = {theirs: shape[ours] for ours, theirs in SHAPE_KEYS.items() if ours in shape}
    if not head.selected_depths:
        entries.pop("candidates", None)
    return entries
