# SPDX-License-Identifier: Apache-2.0
"""Few requests and tokens, for engines under Triton's interpreter."""

from typing import Any

from vllm import SamplingParams

from redrafter_testing.requests import workloads
from redrafter_testing.requests.answers import single_tokens_of

KNOWN, GREEDY_TOKENS, LONGEST = 8, 20, 130
"""An oracle knows answers so much longer than tests ask for: to the end of the last tree."""

TOP_P = {"temperature": 0.8, "top_p": 0.95}
MAX_MODEL_LEN = 256

REASONING: Any = {"reasoning_start_str": "name", "reasoning_end_str": '"list": ['}
REASONING_START, REASONING_END = [272], [3, 271, 258, 270]
"""As the small target's tokenizer has them."""

TIGHT = {"max_num_batched_tokens": 144, "num_gpu_blocks_override": 14}
"""8 trees of 13 nodes, and 40 tokens of a prompt: prompts are read in chunks. 14 blocks of 32
tokens do not hold 8 requests to their end: some are preempted."""


def thinking(bounded: bool = True) -> workloads.Workload:
    """Requests that think, some beside them that do not; or the same without thinking budgets."""
    base = [prompt[:30] for prompt in workloads.prompts(8, seed=11, longest=LONGEST)]
    thoughts = [5, 6, 7, 8]
    cases: list[tuple[list[int], dict[str, Any]]] = [
        (base[0] + REASONING_START, {"thinking_token_budget": 0}),
        (base[1] + REASONING_START, {"thinking_token_budget": 6}),
        (base[2] + REASONING_START + thoughts, {"thinking_token_budget": 6}),
        (base[3] + REASONING_START, {"thinking_token_budget": 5, "temperature": 0.8}),
        # It starts to think in its output, twice.
        (base[6], {"thinking_token_budget": 3, "logit_bias": {REASONING_START[0]: 6.0}}),
        (base[5], {}),
        (base[4], {"temperature": 0.8}),
        (base[7], {"repetition_penalty": 1.3}),
    ]
    params = []
    for _, settings in cases:
        if not bounded:
            settings.pop("thinking_token_budget", None)
        common = {"temperature": 0, "seed": 7, "max_tokens": 20, "ignore_eos": True}
        params.append(SamplingParams(**{**common, **settings}))
    return workloads.Workload([prompt for prompt, _ in cases], params)


def ends() -> workloads.Workload:
    """Requests that reach max_model_len, or may end from some token on."""
    short, long = workloads.prompts(6, seed=13, longest=LONGEST), list(range(2, MAX_MODEL_LEN))
    requests = [
        (long[:-left], SamplingParams(temperature=0, max_tokens=99, ignore_eos=True))
        for left in (18, 7, 1)
    ]
    for prompt, least in zip(short, (1, 4, 5, 9, 14, 17), strict=True):
        params = SamplingParams(
            temperature=0, max_tokens=20, min_tokens=least, logit_bias={1: 4.0 + least % 2 * 5}
        )
        requests.append((prompt, params))
    return workloads.Workload(*map(list, zip(*requests, strict=True)))


ALL = {
    "greedy": workloads.greedy(8, GREEDY_TOKENS + KNOWN, longest=LONGEST),
    "thinking": thinking(),
    "ends": ends(),
    "sampled": workloads.sampling(TOP_P, count=4, max_tokens=24, longest=LONGEST, seed=3),
    "mixed": workloads.mixed(count=1, max_tokens=24, longest=LONGEST),
}
GREEDY = workloads.greedy(8, GREEDY_TOKENS, longest=LONGEST)


def greedy_of(plain: workloads.Plain, count: int | None = None) -> list[list[int]]:
    """What the first requests of GREEDY are answered without speculation."""
    return [tokens[:GREEDY_TOKENS] for tokens in single_tokens_of(plain["greedy"][:count])]


SAMPLED, MIXED = ALL["sampled"], ALL["mixed"]

EVERYTHING = workloads.joined(
    workloads.sampling(workloads.CASES[name], count=1, max_tokens=8, longest=LONGEST)
    for name in ("top-p", "logit-bias", "bad-words", "repetition-penalty", "logprobs", "json")
)
"""Trees, chains, logprobs and so on, in a few steps."""
