# SPDX-License-Identifier: Apache-2.0
"""Options of `generate-data`, `make-prompts` and `capture`: a field each."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vllm_redrafter.data.output_folder import Part
from vllm_redrafter.heads.target_layers import AUTO, LAYERS_HELP, parsed_layers
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.json_files import parse_json
from vllm_redrafter.utils.settings import check, setting

MAX_PROMPT_TOKENS = 256
"""Of a prompt that the target writes; a turn that goes on is left out."""


@dataclass(frozen=True)
class TargetSettings:
    """What the target's tokens depend on besides the distribution that they are drawn from."""

    seed: int = setting(
        0,
        "Seed of the data: the seed of all that is written is derived from it.",
        at_least=0,
        panel="The target's tokens",
    )
    max_model_len: int | None = setting(
        None,
        "The most tokens of a conversation. A longer one is truncated; it is skipped if its first "
        "prompt is longer already.",
        at_least=2,
        default_text="what the target allows",
    )
    dtype: str = setting("auto", "Dtype of the target's weights, as vLLM's --dtype takes it.")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class SamplingSettings(TargetSettings):
    """How the target's tokens are drawn; a part of what makes the data what it is."""

    temperature: float = setting(
        1.0, "Temperature of the target's distribution; 0 is greedy.", at_least=0
    )
    top_p: float = setting(
        1.0,
        "Draw among the most probable tokens that have this probability together. Below 1 the "
        "vocabulary is sorted at every token, which on a CPU takes longer than a small target.",
        above=0,
        at_most=1,
    )
    top_k: int | None = setting(
        None, "Draw among this many most probable tokens.", at_least=1, default_text="all"
    )
    max_tokens: int = setting(1024, "The most tokens of one answer.", at_least=1)


@dataclass(frozen=True)
class EngineSettings:
    """How vLLM runs in this process; what it computes does not depend on it."""

    tensor_parallel_size: int = setting(
        1,
        "Devices that share the target's layers, as vLLM's --tensor-parallel-size.",
        at_least=1,
        panel="vLLM's engine",
    )
    engine_args: str = setting(
        "{}",
        "More arguments of vLLM's engine, as a JSON object with the names that vllm.LLM knows them "
        'by, such as {"gpu_memory_utilization": 0.8} or {"enforce_eager": true}.',
    )

    def __post_init__(self) -> None:
        check(self)
        self.further_arguments()

    def further_arguments(self) -> dict[str, Any]:
        """`engine_args` as a dictionary."""
        try:
            found = parse_json(self.engine_args)
            problem = "" if isinstance(found, dict) else "no object"
        except ValueError as error:
            problem = f"no JSON: {error}"
        if problem:
            raise ConfigError(
                f"--engine-args must be a JSON object, got {self.engine_args!r}: {problem}; give "
                'one such as {"gpu_memory_utilization": 0.8}'
            )
        return dict(found)


@dataclass(frozen=True)
class GenerationSettings:
    """How `generate-data` generates."""

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    system_prompt: str | None = setting(
        None, "System message for conversations that have none of their own."
    )
    in_flight: int = setting(
        256, "Number of conversations that an engine, or each server, works on at once.", at_least=1
    )
    shard_size: int = setting(
        256,
        "Number of conversations in a shard. A run that is stopped loses about as many.",
        at_least=1,
    )
    part: str = setting(
        "1/1",
        "Answer only the k-th of n parts, k/n. Processes with a part each write into the same "
        "folder: a GPU or a machine for each.",
    )
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        check(self)
        Part.parse(self.part)


@dataclass(frozen=True)
class PromptSettings:
    """How `make-prompts` makes prompts."""

    num_prompts: int = setting(
        20_000, "Number of prompts, those of a run before included.", at_least=1
    )
    system_prompt: str | None = setting(
        None,
        "System message that the target writes the user's turn after, for another language or "
        "subject; it is kept with each prompt.",
    )
    temperature: float = setting(1.0, "Temperature of the target's distribution.", above=0)
    target: TargetSettings = field(default_factory=TargetSettings)
    in_flight: int = setting(
        256, "Number of attempts that the engine works on at once.", at_least=1
    )
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        check(self)

    @property
    def sampling(self) -> SamplingSettings:
        """How prompts are drawn: never greedily, or all would be one."""
        return SamplingSettings(
            **asdict(self.target), temperature=self.temperature, max_tokens=MAX_PROMPT_TOKENS
        )


@dataclass(frozen=True)
class CaptureSettings:
    """How `capture` captures hidden states."""

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
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        check(self)
        Part.parse(self.part)
        parsed_layers(self.target_layers)
