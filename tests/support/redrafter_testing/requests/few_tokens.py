# SPDX-License-Identifier: Apache-2.0
"""A target of so few tokens that a random drafter is often right: no oracle is needed."""

from typing import Any

from vllm import SamplingParams

from redrafter_testing.requests import workloads

VOCAB, HIDDEN = 24, 64
TOKENS = 40
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}

Answers = dict[str, list[list[int]]]
"""By sampling, or by what is asked: each request's tokens."""

TIGHT = {"max_num_batched_tokens": 120, "num_gpu_blocks_override": 12}
"""Of Model Runner V2: prompts are read in chunks, beside trees; not all requests fit into the KV
cache to their end."""


def requests(sampling: str, count: int = 8) -> workloads.Workload:
    """Prompts and answers of mixed length; needs no tokenizer."""
    prompts = [[2 + (5 * i + t * t) % (VOCAB - 2) for t in range(5 + 9 * i)] for i in range(count)]
    params = [
        SamplingParams(max_tokens=TOKENS - 3 * i, seed=i, ignore_eos=True, **SAMPLING[sampling])
        for i in range(count)
    ]
    return workloads.Workload(prompts, params)


def answers_of(llm: Any) -> Answers:
    """What an engine answers to all of them, by sampling."""
    return {sampling: llm.tokens(requests(sampling)) for sampling in SAMPLING}


def opening(sampling: str) -> workloads.Workload:
    """Of these requests, those that fill blocks before they answer."""
    asked = requests(sampling)
    return workloads.Workload(asked.prompts[4:], asked.params[4:])


def conversations(llm: Any, between: workloads.Workload | None = None) -> Answers:
    """Two answers in each conversation: the second one's prompt has the first answer in it.

    In between, other texts may fill a small KV cache.
    """
    found = {}
    for sampling in SAMPLING:
        asked = opening(sampling)
        first = found[f"{sampling}, first"] = llm.tokens(asked)
        if between is not None:
            llm.run(between)
        texts = [[*p, *a, 5, 7] for p, a in zip(asked.prompts, first, strict=True)]
        found[f"{sampling}, second"] = llm.tokens(workloads.Workload(texts, asked.params))
    return found
