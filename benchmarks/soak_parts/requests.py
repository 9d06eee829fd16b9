# SPDX-License-Identifier: Apache-2.0
"""What is asked: requests of all kinds, drawn from a seed, so that two servers get the same."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ABORTED = 0.1
"""The share of requests whose client goes away midway."""

STREAMED = 0.6
SHARED = 96
"""Tokens that a third of the prompts begin with: their blocks are shared (prefix caching)."""

OWN = (1, 160)
ANSWER = (8, 48)
"""Tokens of a prompt's own, and of an answer at most."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy to the end": {"temperature": 0, "ignore_eos": True},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.3},
    "greedy with bias": {"temperature": 0, "logit_bias": {"7": 2.0, "11": 1.0}},
    "greedy with logprobs": {"temperature": 0, "logprobs": 5},
    "greedy with a stop string": {"temperature": 0, "stop": ["a", "1"]},
    "greedy with a grammar": {
        "temperature": 0,
        "structured_outputs": {"regex": "(ab|cd|[0-9]{3}){2,9}"},
    },
    "sampled": {"temperature": 0.8},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 7},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    "bias": {"temperature": 0.8, "logit_bias": {"5": 3.0, "9": -100.0}},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "stop string": {"temperature": 0.8, "stop": ["a", "1"]},
    "n = 2": {"temperature": 0.9, "n": 2},
    "grammar": {"temperature": 0.9, "structured_outputs": {"json": SCHEMA}},
    "few nodes": {"temperature": 0.8, "vllm_xargs": {"redrafter.spec_tokens": 2}},
}
"""By name, what a completion of the kind asks for. All that sample get a seed of their own."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        number: its place in the order of arrival.
        kind: a key of `KINDS`.
        body: of the HTTP request, without the model.
        abort_after: tokens (streamed) or tenths of a second (not) after which its client goes
            away; None for a client that stays.
    """

    number: int
    kind: str
    body: dict[str, Any]
    abort_after: int | None

    def __str__(self) -> str:
        return f"request {self.number} ({self.kind})"

    def for_plain(self) -> dict[str, Any]:
        """The body without what only ReDrafter knows."""
        return {key: value for key, value in self.body.items() if key != "vllm_xargs"}


def requests(count: int, vocabulary: int, seed: int) -> list[Request]:
    """The requests of a run; token ids of prompts are from 2, the first two being special ones."""
    source = random.Random(seed)
    shared = [source.randrange(2, vocabulary) for _ in range(SHARED)]
    return [_request(number, source, shared, vocabulary) for number in range(count)]


def _request(number: int, source: random.Random, shared: list[int], vocabulary: int) -> Request:
    kind = source.choice(list(KINDS))
    own = [source.randrange(2, vocabulary) for _ in range(source.randint(*OWN))]
    longest = source.randint(*ANSWER)
    stream = source.random() < STREAMED
    seed = {"seed": source.randrange(2**31)} if KINDS[kind]["temperature"] else {}
    body = {
        "prompt": shared + own if source.random() < 1 / 3 else own,
        "max_tokens": longest,
        "return_token_ids": True,
        "stream": stream,
        **seed,
        **KINDS[kind],
    }
    aborted = source.random() < ABORTED
    return Request(number, kind, body, source.randrange(longest) if aborted else None)
