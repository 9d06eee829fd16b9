# SPDX-License-Identifier: Apache-2.0
"""What `capture` may be told; a new setting is a new field here, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vllm_redrafter.data.generation_settings import EngineSettings
from vllm_redrafter.data.parts import Part
from vllm_redrafter.heads.target_layers import AUTO, LAYERS_HELP, parsed_layers
from vllm_redrafter.utils.settings import check, setting


@dataclass(frozen=True)
class CaptureSettings:
    """How to capture hidden states; the order of the fields is that of `capture --help`.

    Attributes:
        engine: how vLLM runs.

    Raises:
        ConfigError: a value is out of range.
    """

    max_length: int = setting(
        2048,
        "Rows are cut to this many tokens: the longest --block-length that can be trained with.",
        at_least=2,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Dtype of the target's weights in vLLM and of the hidden states; auto takes that of its "
        "checkpoint.",
    )
    target_layers: str = setting(
        AUTO,
        "Capture the hidden states of these layers too, for train --target-layers: "
        f"{LAYERS_HELP}. Each takes as much disk as the last hidden states.",
    )
    part: str = setting(
        "1/1",
        "Capture only the k-th of n parts, k/n. Processes with a part each write into the same "
        "folder: a GPU or a machine for each.",
    )
    in_flight: int = setting(64, "Number of rows that the engine works on at once.", at_least=1)
    check_rows: int = setting(
        3,
        "Compute this many rows with transformers as well, when all are captured, and compare. 0 "
        "where no machine can load the target with transformers.",
        at_least=0,
    )
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        check(self, "capture:")
        self.own_part()
        parsed_layers(self.target_layers, "capture: target_layers")

    def own_part(self) -> Part:
        """`part`, parsed."""
        return Part.parse(self.part, "capture:")
