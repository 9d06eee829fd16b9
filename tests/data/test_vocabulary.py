# SPDX-License-Identifier: Apache-2.0
"""Which tokens a target has embeddings of."""

from pathlib import Path

from redrafter_testing.models.tiny_models import add_tokenizer, make_small_target
from vllm_redrafter.data.target import Target
from vllm_redrafter.data.vocabulary import EmbeddedTokens


def test_a_token_behind_the_embeddings_end_is_named(tmp_path: Path) -> None:
    folder = make_small_target(tmp_path)
    add_tokenizer(folder)
    target = Target.open(folder)
    tokenizer = target.tokenizer
    embedded = EmbeddedTokens(tokenizer, target.vocab_size)
    assert embedded.are_all and embedded.trouble([0, 511]) is None

    rows = len(tokenizer)
    tokenizer.add_tokens(["<|extra|>"])
    embedded = EmbeddedTokens(tokenizer, rows)
    assert not embedded.are_all
    assert embedded.trouble(tokenizer("value 1")["input_ids"]) is None
    assert embedded.trouble(tokenizer("value <|extra|> 1")["input_ids"]) == (
        f"token '<|extra|>' (id {rows}) has no row in the target's embedding of {rows} rows"
    )
