# SPDX-License-Identifier: Apache-2.0
"""What plugin.py recorded in VllmConfig: which drafter, and how to speculate with it."""

from dataclasses import dataclass
from typing import Self

from vllm.config import VllmConfig

from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.utils.names import METHOD


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        model: the drafter's checkpoint, a folder or a hub id; None where there is none of ours.
        draft: vLLM's method for a drafter of its own; None where there is none.
        own_graph_sizes: the user has set the sizes of CUDA graphs.
        target_layers: the drafter's; recorded as the compiled target depends on them.
    """

    model: str | None
    revision: str | None
    config: ReDrafterConfig
    own_graph_sizes: bool = False
    target_layers: tuple[int, ...] = ()
    draft: str | None = None

    def checkpoint(self) -> Checkpoint | None:
        """The drafter's, opened: once in each worker."""
        return None if self.model is None else Checkpoint.open(self.model, self.revision)

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        recorded = dict(vllm_config.additional_config[METHOD])
        model, revision = recorded.pop("model"), recorded.pop("revision", None)
        own_graph_sizes = recorded.pop("own_graph_sizes", False)
        layers = tuple(recorded.pop("target_layers", None) or ())
        draft = recorded.pop("draft", None)
        config = ReDrafterConfig(**recorded)
        return cls(model, revision, config, own_graph_sizes, layers, draft)
