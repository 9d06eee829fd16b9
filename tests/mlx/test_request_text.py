"""How a request's text went on before."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core")

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.mlx.request_text import RequestText


def test_what_followed_the_last_tokens_before_is_found_in_prompt_and_answer() -> None:
    text = RequestText([1, 2, 3, 4, 5, 6, 9, 2], ReDrafterConfig(4), vocab_size=50)
    found = text.matches()
    assert found is not None
    assert found.tokens[0, 0].tolist() == [3, 4, 5, 6]
    for token in range(20, 50):
        text.append([token])
    text.append([8, 21])
    found = text.matches()
    assert found is not None
    assert found.tokens[0, 0].tolist() == [22, 23, 24, 25]


def test_nobody_looks_where_no_match_is_asked_for() -> None:
    assert RequestText([1, 2, 1], ReDrafterConfig(4, context_matches=0), 50).matches() is None
