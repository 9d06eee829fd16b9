# SPDX-License-Identifier: Apache-2.0
"""What tests ask about vLLM's answers."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def tokens_of(answers: list[Any]) -> list[list[list[int]]]:
    """Token ids by request and output."""
    return [[list(o.token_ids) for o in answer.outputs] for answer in answers]


def single_tokens_of(answers: list[Any]) -> list[list[int]]:
    """Token ids by request, where each has one output."""
    return [tokens for (tokens,) in tokens_of(answers)]


def assert_same(answers: Sequence[Any], expected: Sequence[Any], names: Iterable[str]) -> None:
    """Of requests with these names: the same tokens and texts, and `assert_logprobs_close`."""
    for name, answer, wanted in zip(names, answers, expected, strict=True):
        assert tokens_of([answer]) == tokens_of([wanted]), name
        assert [o.text for o in answer.outputs] == [o.text for o in wanted.outputs], name
        assert_logprobs_close(answer, wanted)


def assert_logprobs_close(answer: Any, expected: Any) -> None:
    """The same tokens, ranks and, nearly, numbers; and none where `expected` has none."""
    pairs = [(answer.prompt_logprobs, expected.prompt_logprobs)]
    for output, wanted in zip(answer.outputs, expected.outputs, strict=True):
        pairs.append((output.logprobs, wanted.logprobs))
    for found, wanted in pairs:
        assert (found is None) == (wanted is None)
        for of_token, wanted_of_token in zip(found or (), wanted or (), strict=True):
            assert (of_token or {}).keys() == (wanted_of_token or {}).keys()
            for token, logprob in (of_token or {}).items():
                assert logprob.rank == wanted_of_token[token].rank
                assert logprob.logprob == pytest.approx(wanted_of_token[token].logprob, abs=1e-4)
