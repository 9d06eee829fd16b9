# SPDX-License-Identifier: Apache-2.0
"""Requests whose answers must not depend on speculation, by name."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

VOCAB = 512


@dataclass(frozen=True)
class Workload:
    """Prompts (token ids) and the parameters that all, or one each, are sampled with."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    def run(self, llm: Any) -> list[Any]:
        prompts = [{"prompt_token_ids": prompt} for prompt in self.prompts]
        return llm.generate(prompts, self.params, use_tqdm=False)


Plain = dict[str, list[Any]]
"""vLLM's answers without speculation, by workload."""


@dataclass(frozen=True)
class Repeated:
    """So many unseeded requests with one prompt; answers are counted where they are made."""

    prompt: list[int]
    params: SamplingParams
    count: int

    def run(self, llm: Any) -> Counter[tuple[int, ...]]:
        """How often each answer came."""
        prompts = [{"prompt_token_ids": self.prompt}] * self.count
        answers = llm.generate(prompts, self.params, use_tqdm=False)
        return Counter(tuple(answer.outputs[0].token_ids) for answer in answers)


def prompts(count: int, seed: int, longest: int = 220) -> list[list[int]]:
    """Prompts of mixed length; every third starts with the same 96 tokens (prefix caching)."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, VOCAB) for _ in range(96)]
    made = []
    for i in range(count):
        own = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, longest - 96))]
        made.append(shared + own if i % 3 == 0 else own)
    return made


def greedy(count: int, max_tokens: int, seed: int = 0, longest: int = 220) -> Workload:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Workload(prompts(count, seed, longest), [params] * count)


JSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 7},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "logit-bias": {"temperature": 0.8, "logit_bias": {5: 3.0, 9: -100.0}},
    "logit-bias-greedy": {"temperature": 0, "logit_bias": {7: 2.0, 11: 1.0}},
    "allowed-tokens": {"temperature": 1.0, "allowed_token_ids": list(range(10, 40))},
    "bad-words": {"temperature": 0, "bad_words": ["e", "al", '"name']},
    "repetition-penalty": {"temperature": 0, "repetition_penalty": 1.3},
    "other penalties": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    "greedy-with-eos": {"temperature": 0, "ignore_eos": False, "logit_bias": {1: 4.0}},
    "min-tokens": {"temperature": 0, "ignore_eos": False, "min_tokens": 20, "logit_bias": {1: 9.0}},
    "stop-token": {"temperature": 0, "stop_token_ids": list(range(100, 120))},
    "stop-string": {"temperature": 0, "stop": ["a", "1"]},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "greedy-logprobs": {"temperature": 0, "logprobs": 5, "prompt_logprobs": 2},
    "n": {"temperature": 0.9, "n": 3},
    "json": {"temperature": 0.9, "structured_outputs": StructuredOutputsParams(json=JSON_SCHEMA)},
    "regex-greedy": {
        "temperature": 0,
        "structured_outputs": StructuredOutputsParams(regex="(ab|cd|[0-9]{3}){2,9}"),
    },
}
"""Ways to sample, by name."""


def sampling(
    case: Mapping[str, Any], count: int, max_tokens: int = 40, longest: int = 220, seed: int = 7
) -> Workload:
    """Sampled so; seeded, so that the tokens are comparable."""
    settings = {"max_tokens": max_tokens, "ignore_eos": "structured_outputs" not in case, **case}
    params = [SamplingParams(**settings, seed=1000 + i) for i in range(count)]
    return Workload(prompts(count, seed, longest), params)


def joined(loads: Iterable[Workload]) -> Workload:
    """The requests of all the loads, in one."""
    loads = list(loads)
    return Workload(
        [prompt for load in loads for prompt in load.prompts],
        [params for load in loads for params in load.params],
    )


def mixed(count: int = 2, max_tokens: int = 40, longest: int = 220) -> Workload:
    """All cases in one batch: trees, chains, plain rows and prefill chunks side by side."""
    return joined(sampling(case, count, max_tokens, longest) for case in CASES.values())


MIXED = mixed()
