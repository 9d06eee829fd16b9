# SPDX-License-Identifier: Apache-2.0
"""One request, answered many times over."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams


@dataclass(frozen=True)
class Repeated:
    """So many unseeded requests with this prompt; their answers are counted where they are made."""

    prompt: list[int]
    params: SamplingParams
    count: int

    def run(self, llm: Any) -> Counter[tuple[int, ...]]:
        """How often each answer came."""
        prompts = [{"prompt_token_ids": self.prompt}] * self.count
        answers = llm.generate(prompts, self.params, use_tqdm=False)
        return Counter(tuple(answer.outputs[0].token_ids) for answer in answers)
