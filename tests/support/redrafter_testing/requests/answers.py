"""What tests ask about vLLM's answers."""

from __future__ import annotations

from typing import Any

import pytest


def tokens_of(answers: list[Any]) -> list[list[list[int]]]:
    """Token ids by request and output."""
    return [[list(o.token_ids) for o in answer.outputs] for answer in answers]


def single_tokens_of(answers: list[Any]) -> list[list[int]]:
    """Token ids by request, where each has one output."""
    return [tokens for (tokens,) in tokens_of(answers)]


def assert_logprobs_close(answer: Any, expected: Any) -> None:
    """Where `expected` has logprobs: the same tokens, ranks and, nearly, numbers."""
    for output, wanted in zip(answer.outputs, expected.outputs, strict=True):
        if wanted.logprobs is None:
            continue
        assert len(output.logprobs) == len(wanted.logprobs)
        for step, wanted_step in zip(output.logprobs, wanted.logprobs, strict=True):
            assert step.keys() == wanted_step.keys()
            for token, logprob in step.items():
                assert logprob.rank == wanted_step[token].rank
                assert logprob.logprob == pytest.approx(wanted_step[token].logprob, abs=1e-4)
