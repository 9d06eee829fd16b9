# SPDX-License-Identifier: Apache-2.0
"""The settings of `chat`."""

from dataclasses import dataclass

from vllm_redrafter.utils.settings import check, setting


@dataclass(frozen=True)
class ChatSettings:
    """How answers are drawn."""

    system_prompt: str | None = setting(None, "System message that the conversation begins with.")
    temperature: float = setting(
        0.7, "Temperature of the target's distribution; 0 is greedy.", at_least=0
    )
    max_tokens: int = setting(1024, "The most tokens of one answer.", at_least=1)

    def __post_init__(self) -> None:
        check(self)
