# SPDX-License-Identifier: Apache-2.0
"""Limits of the two configurations and what the errors say; what a draft vocabulary means."""

from typing import Any

import pytest
import torch
from torch import nn

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.tree.beam_search import beam_search
from vllm_redrafter.utils.errors import ConfigError

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 8, "exit_dim": 16}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, True, 8.0, "8", None])
def test_drafter_sizes_must_be_positive_integers(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} .* at least 1, got {value!r}"):
        RecurrentConfig(**{**SIZES, name: value})


def test_input_projection_exists_unless_exit_dim_is_twice_the_hidden_size() -> None:
    for exit_dim in (8, 15, 16, 17):
        config = RecurrentConfig(vocab_size=32, hidden_size=8, exit_dim=exit_dim)
        assert config.has_input_projection is (exit_dim != 16)


def test_a_draft_vocabulary_larger_than_the_targets_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size 33 exceeds vocab_size 32"):
        RecurrentConfig(**SIZES, draft_vocab_size=33)
    with pytest.raises(ConfigError, match="draft_vocab_size must be an integer of at least 1"):
        RecurrentConfig(**SIZES, draft_vocab_size=0)


@pytest.mark.parametrize("names", [["vocab_size"], ["hidden_size", "exit_dim"], list(SIZES)])
def test_from_dict_names_all_missing_sizes(names: list[str]) -> None:
    values = {name: size for name, size in SIZES.items() if name not in names}
    with pytest.raises(ConfigError, match=f"lacks {', '.join(names)}"):
        RecurrentConfig.from_dict(values)


NO_INTEGERS = [True, 1.0, "4", None]
TREES = ["explored", "beams", "chain"]


@pytest.mark.parametrize(
    ("name", "accepted", "refused", "limit"),
    [
        (
            "num_speculative_tokens",
            [1, 127],
            [0, -1, 128, *NO_INTEGERS],
            "between 1 and 127 (tree ",
        ),
        ("beam_width", [1, 50], [0, -1, *NO_INTEGERS], "at least 1"),
        ("beam_width", [4], [51], "at most 50"),
        ("beam_length", [1, 127], [0, -1, *NO_INTEGERS], "at least 1"),
        ("beam_length", [4], [128], "at most 127"),
        ("tree", TREES, ["prefix", "Beams", "", None, ["beams"]], "one of explored, beams, chain"),
        ("context_matches", [0, 4], [-1, 5, 1.0, True, "2"], "between 0 and 4 ("),
        ("earlier_answers", [0, 1_000_000], [-1, 1_000_001, 1.0, True], "between 0 and 1000000 ("),
        ("earlier_prompts", [True, False], [0, "yes", None], "true or false"),
        ("candidates", [0, 32, 512], [-1, 31, 513, True, "64"], "0, or between 32 and 512 ("),
    ],
)
def test_limits_are_accepted_and_other_values_refused_with_them(
    name: str, accepted: list[Any], refused: list[Any], limit: str
) -> None:
    for value in accepted:
        config = ReDrafterConfig(**{"num_speculative_tokens": 16, name: value})
        assert getattr(config, name) == value
    for value in refused:
        with pytest.raises(ConfigError) as error:
            ReDrafterConfig(**{"num_speculative_tokens": 16, name: value})
        message = str(error.value)
        assert f"{name} must be" in message and limit in message and repr(value) in message


def test_a_path_is_no_longer_than_a_step_can_verify() -> None:
    assert [ReDrafterConfig(k).path_length for k in (3, 8, 12)] == [3, 8, 8]


def test_a_large_draft_vocabulary_is_advised_against() -> None:
    large = RecurrentConfig(128_256, 8, 8)
    assert large.advice is not None
    assert "128,256 tokens" in large.advice and "--draft-vocab-size 32768" in large.advice
    assert RecurrentConfig(128_256, 8, 8, draft_vocab_size=32_768).advice is None
    assert RecurrentConfig(65_535, 8, 8).advice is None
    assert RecurrentConfig(65_536, 8, 8).advice is not None
    assert RecurrentConfig(65_536, 8, 8, selector=SelectorConfig(4, 2)).advice is None


VOCAB, HIDDEN = 40, 8
KEPT = torch.tensor([3, 4, 9, 17, 18, 30, 39])


@torch.no_grad()
def test_the_search_is_that_of_a_drafter_that_is_forbidden_the_other_tokens() -> None:
    torch.manual_seed(0)
    reduced = RecurrentHead(
        RecurrentConfig(VOCAB, HIDDEN, exit_dim=6, draft_vocab_size=len(KEPT))
    ).eval()
    reduced.keep_tokens(KEPT)
    weights = reduced.state_dict()
    kept_rows = weights.pop("lm_head.1.weight")
    del weights["d2t"]
    whole = RecurrentHead(RecurrentConfig(VOCAB, HIDDEN, exit_dim=6)).eval()
    whole.load_state_dict(weights, strict=False)
    whole.lm_head[-1] = nn.Linear(6, VOCAB)
    whole.lm_head[-1].weight[KEPT] = kept_rows
    whole.lm_head[-1].bias.fill_(-torch.inf)[KEPT] = 0.0

    embed, hidden = nn.Embedding(VOCAB, HIDDEN), torch.randn(5, HIDDEN)
    roots = torch.randint(VOCAB, (5,))
    found, expected = (
        beam_search(drafter, embed, hidden, roots, beam_width=4, beam_length=3)
        for drafter in (reduced, whole)
    )
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.isin(found.tokens, KEPT).all()
    torch.testing.assert_close(found.log_probs, expected.log_probs)


@pytest.mark.parametrize("off", ["earlier_answers", "context_matches"])
def test_prompts_are_not_kept_where_nothing_would_search_them(off: str) -> None:
    with pytest.raises(ConfigError, match=f"false without .*{off}"):
        ReDrafterConfig(1, earlier_prompts=True, **{off: 0})
