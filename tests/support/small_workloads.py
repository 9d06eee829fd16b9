"""Few requests and tokens, for engines under Triton's interpreter."""

from __future__ import annotations

import workloads

KNOWN = 8
"""Greedy answers are some tokens longer here than tests ask for: an oracle has to know the
continuation to the end of the last tree."""

GREEDY_TOKENS = 20
LONGEST = 130

TOP_P = workloads.Case("top-p", {"temperature": 0.8, "top_p": 0.95})

ALL = {
    "greedy": workloads.greedy(8, GREEDY_TOKENS + KNOWN, longest=LONGEST),
    "sampled": workloads.sampling(TOP_P, count=4, max_tokens=24, longest=LONGEST, seed=3),
    "mixed": workloads.mixed(count=1, max_tokens=24, longest=LONGEST),
}
GREEDY = workloads.greedy(8, GREEDY_TOKENS, longest=LONGEST)
SAMPLED, MIXED = ALL["sampled"], ALL["mixed"]

EVERYTHING = workloads.joined(
    workloads.sampling(case, count=1, max_tokens=8, longest=LONGEST)
    for case in workloads.CASES
    if case.name in ("top-p", "logit-bias", "bad-words", "repetition-penalty", "logprobs", "json")
)
"""Trees, chains, logprobs and so on, in a few steps."""
