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


def requests(sampling: str, count: int = 8) -> workloads.Workload:
    """Prompts and answers of mixed length; needs no tokenizer."""
    prompts = [[2 + (5 * i + t * t) % (VOCAB - 2) for t in range(5 + 9 * i)] for i in range(count)]
    params = [
        SamplingParams(max_tokens=TOKENS - 3 * i, seed=i, ignore_eos=True, **SAMPLING[sampling])
        for i in range(count)
    ]
    return workloads.Workload(prompts, params)
