# SPDX-License-Identifier: Apache-2.0
"""What `generate-data` may be told; a new setting is a new field here, and nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_redrafter.data.parts import Part
from vllm_redrafter.data.text_checks import check_system_prompt
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.json_files import parse_json
from vllm_redrafter.utils.settings import check, setting


@dataclass(frozen=True)
class SamplingSettings:
    """How the target's tokens are drawn; a part of what makes the data what it is.

    Raises:
        ConfigError: a value is out of range.
    """

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
    seed: int = setting(
        0, "Seed of the data: the seed of all that is written is derived from it.", at_least=0
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
        check(self, "sampling:")


@dataclass(frozen=True)
class EngineSettings:
    """How vLLM runs in this process; what it computes does not depend on it.

    Raises:
        ConfigError: a value is out of range, or `engine_args` is no JSON object.
    """

    tensor_parallel_size: int = setting(
        1, "Devices that share the target's layers, as vLLM's --tensor-parallel-size.", at_least=1
    )
    engine_args: str = setting(
        "{}",
        "More arguments of vLLM's engine, as a JSON object with the names that vllm.LLM knows them "
        'by, such as {"gpu_memory_utilization": 0.8}.',
    )
    enforce_eager: bool = setting(
        False, "Run vLLM without compilation and without CUDA graphs, as its --enforce-eager."
    )

    def __post_init__(self) -> None:
        check(self, "engine:")
        self.further_arguments()

    def further_arguments(self) -> dict[str, Any]:
        """`engine_args` as a dictionary."""
        problem = f"engine_args must be a JSON object, got {self.engine_args!r}"
        try:
            found = parse_json(self.engine_args)
        except ValueError as error:
            raise ConfigError(f"{problem}: no JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(
                f'{problem}: give a JSON object, such as {{"gpu_memory_utilization": 0.8}}'
            )
        return found


@dataclass(frozen=True)
class GenerationSettings:
    """How to generate.

    Attributes:
        sampling: how tokens are drawn.
        engine: how vLLM runs.

    Raises:
        ConfigError: a value is out of range.
    """

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    system_prompt: str | None = setting(
        None, "System message for conversations that have none of their own."
    )
    strict: bool = setting(
        False,
        "End with an error at the first row of the prompts that cannot be used, instead of leaving "
        "such rows out.",
    )
    drafter: str | None = setting(
        None, "A ReDrafter checkpoint to generate with. The data is the same, but sooner there."
    )
    spec_tokens: int = setting(
        12, "With --drafter: tree nodes verified per request and step.", at_least=1
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
        check(self, "generation:")
        self.own_part()
        check_system_prompt(self.system_prompt)

    def own_part(self) -> Part:
        """`part`, parsed."""
        return Part.parse(self.part, "generation:")


@dataclass(frozen=True)
class EndpointSettings:
    """How to ask running servers (`generate-data --endpoint`).

    Raises:
        ConfigError: a value is out of range.
    """

    served_name: str | None = setting(
        None,
        "With --endpoint: the name that the servers give the target.",
        default_text="that of TARGET",
    )
    request_timeout: float = setting(
        1800.0,
        "With --endpoint: seconds that an answer may take; then the server is left out.",
        above=0,
    )

    def __post_init__(self) -> None:
        check(self, "endpoints:")


@dataclass(frozen=True)
class PromptSampling(SamplingSettings):
    """How the tokens of prompts are drawn: never greedily, and not for as long."""

    temperature: float = setting(1.0, "Temperature of the target's distribution.", above=0)
    max_tokens: int = setting(
        256, "The most tokens of a prompt; a turn that goes on is left out.", at_least=1
    )


@dataclass(frozen=True)
class PromptSettings:
    """How `make-prompts` makes prompts.

    Attributes:
        sampling: how tokens are drawn.
        engine: how vLLM runs.

    Raises:
        ConfigError: a value is out of range.
    """

    num: int = setting(20_000, "Number of prompts, those of a run before included.", at_least=1)
    system_prompt: str | None = setting(
        None,
        "System message that the target writes the user's turn after, for another language or "
        "subject; it is kept with each prompt.",
    )
    min_characters: int = setting(12, "Leave out what is shorter.", at_least=1)
    sampling: PromptSampling = field(default_factory=PromptSampling)
    in_flight: int = setting(
        256, "Number of attempts that the engine works on at once.", at_least=1
    )
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        check(self, "prompts:")
        check_system_prompt(self.system_prompt)

    def recipe(self) -> dict[str, Any]:
        """What the prompts depend on: not how many there shall be, nor how they are computed."""
        own = {"system_prompt": self.system_prompt, "min_characters": self.min_characters}
        return {**own, **asdict(self.sampling)}
