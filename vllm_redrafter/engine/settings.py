"""What plugin.py recorded in VllmConfig: which drafter, and how to speculate with it."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import VllmConfig

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.names import METHOD


@dataclass(frozen=True)
class Settings:
    """The drafter's checkpoint (a folder or a hub id), and our part of the speculative config."""

    model: str
    revision: str | None
    config: ReDrafterConfig

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Settings:
        recorded = dict(vllm_config.additional_config[METHOD])
        model, revision = recorded.pop("model"), recorded.pop("revision", None)
        return cls(model, revision, ReDrafterConfig(**recorded))
