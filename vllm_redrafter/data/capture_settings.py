"""What `capture` may be told; a new setting is a new field here, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vllm_redrafter.data.generation_settings import parsed_engine_args
from vllm_redrafter.data.parts import Part
from vllm_redrafter.heads.target_layers import LAYERS_HELP, parsed_layers
from vllm_redrafter.utils.settings import check, setting


@dataclass(frozen=True)
class CaptureSettings:
    """How to capture hidden states; the order of the fields is that of `capture --help`.

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
    target_layers: str | None = setting(
        None,
        "Capture the hidden states of these layers too, for train --target-layers: "
        f"{LAYERS_HELP}. Each takes as much disk as the last hidden states.",
        default_text="none",
    )
    part: str = setting(
        "1/1",
        "Capture only the k-th of n parts, k/n. Processes with a part each write into the same "
        "folder: a GPU or a machine for each.",
    )
    tensor_parallel_size: int = setting(
        1, "Number of GPUs that the target is spread over, as vLLM's option.", at_least=1
    )
    engine_args: str = setting(
        "{}", "More of vLLM's arguments, as JSON: '{\"pipeline_parallel_size\": 2}'."
    )
    in_flight: int = setting(64, "Number of rows that the engine works on at once.", at_least=1)
    check_rows: int = setting(
        3,
        "Compute this many rows with transformers as well, when all are captured, and compare. 0 "
        "where no machine can load the target with transformers.",
        at_least=0,
    )
    enforce_eager: bool = setting(
        False, "Run vLLM without compilation and without CUDA graphs, as its --enforce-eager."
    )

    def __post_init__(self) -> None:
        check(self, "capture:")
        self.own_part()
        self.engine_arguments()
        parsed_layers(self.target_layers, "capture: target_layers")

    def own_part(self) -> Part:
        """`part`, parsed."""
        return Part.parse(self.part, "capture:")

    def engine_arguments(self) -> dict[str, Any]:
        """`engine_args` as a dictionary."""
        return parsed_engine_args(self.engine_args)
