# SPDX-License-Identifier: Apache-2.0
"""Reading a drafter's checkpoint: config.json and safetensors of a folder or hub id."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vllm_redrafter.checkpoints.acceptance import PerSampling, acceptance_of
from vllm_redrafter.checkpoints.drafter_files import CONFIG_FILE, read_config
from vllm_redrafter.checkpoints.published_config import MODEL_TYPE, own_values
from vllm_redrafter.checkpoints.tensors import check_tensors, own_tensors
from vllm_redrafter.checkpoints.weight_files import SERVED, find_weights, read_weights
from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.heads.registry import build_head, heads
from vllm_redrafter.utils.errors import ConfigError

SHAPE_KEYS = {
    "num_speculative_tokens": "speculative_tokens",
    "beam_width": "beam_width",
    "beam_length": "beam_length",
    "candidates": "candidates",
}
"""Names of `ReDrafterConfig`, and those in a checkpoint's proposal method."""


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
    def open(cls, model: str, revision: str | None = None) -> Self:
        """Read a config.json; a ConfigError where there is no ReDrafter's."""
        return cls.of(model, revision, read_config(model, revision))

    @classmethod
    def of(cls, model: str, revision: str | None, values: Mapping[str, Any]) -> Self:
        """The checkpoint whose config.json has these values."""
        values = own_values(values, model)
        if not values:
            raise ConfigError(
                f"{model!r} has no {CONFIG_FILE}, or an empty one: give a ReDrafter checkpoint, or "
                "make one of the weights there with `vllm-redrafter convert`"
            )
        head = head_of(model, values).config_class.from_dict(values)
        try:
            return cls(model, revision, values, head, acceptance_of(values))
        except ConfigError as error:
            raise ConfigError(f"{model}: {error}") from error

    @cached_property
    def weights(self) -> tuple[Path, ...]:
        """model.safetensors, or its shards."""
        return find_weights(self.model, self.revision, SERVED)

    def checked(self) -> Self:
        """This one, its tensors checked by name and shape; a ConfigError lists what is wrong."""
        self._tensors()
        return self

    def load(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> DraftHead:
        """The drafter in a dtype, checked; a ConfigError where weights are NaN or infinite.

        Tensors are copied, to the device one at a time: others may write to the files meanwhile.
        """
        tensors = {
            name: t.to(device, dtype if t.is_floating_point() else torch.int64, copy=True)
            for name, t in self._tensors().items()
        }
        drafter = build_drafter(self.head, tensors)
        for name, weights in drafter.named_parameters():
            if not torch.stack(weights.aminmax()).isfinite().all():
                raise ConfigError(
                    f"{self.weights}: {name} holds NaN or infinity in "
                    f"{str(dtype).removeprefix('torch.')}; take another dtype, or a checkpoint "
                    "from before the training went wrong"
                )
        return drafter

    def _tensors(self) -> dict[str, Tensor]:
        where, kind = str(self.weights), heads()[self.head.model_type]
        tensors = own_tensors(where, kind, self.values, read_weights(self.weights))
        check_tensors(where, self.head, tensors)
        return tensors


def is_drafter(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a drafter, ours or a published speculator."""
    return values.get("model_type") in (*heads(), MODEL_TYPE)


def head_of(model: str, values: Mapping[str, Any]) -> type[DraftHead]:
    """The head that a config.json names; a ConfigError where it names none."""
    if values.get("model_type") not in heads():
        found = repr(values["model_type"]) if "model_type" in values else "none"
        known = " or ".join(f'"{model_type}"' for model_type in heads())
        raise ConfigError(
            f"{model!r} is not a ReDrafter checkpoint: its config.json must say "
            f'"model_type": {known}, found {found}'
        )
    return heads()[values["model_type"]]


def load_drafter(
    model: str, dtype: torch.dtype = torch.float32, revision: str | None = None
) -> DraftHead:
    """Read a checkpoint, checked, of a folder or a hub id; the parameters get the dtype."""
    return Checkpoint.open(model, revision).load(dtype)


def build_drafter(config: HeadConfig, tensors: Mapping[str, Tensor]) -> DraftHead:
    """A drafter for inference of checked tensors by our names."""
    with torch.device("meta"):
        drafter = build_head(config)
    own = {name: t if t.is_floating_point() else t.long() for name, t in tensors.items()}
    drafter.load_state_dict(own, assign=True)
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
