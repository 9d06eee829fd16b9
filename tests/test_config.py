# SPDX-License-Identifier: Apache-2.0
"""Every limit of the two configurations, and what the errors say."""

from typing import Any

import pytest

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.heads.recurrent import RecurrentConfig
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.utils.errors import ConfigError

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 8, "exit_dim": 16}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, True, 8.0, "8", None])
def test_drafter_sizes_must_be_positive_integers(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} .* at least 1, got {value!r}"):
        RecurrentConfig(**{**SIZES, name: value})


def test_drafter_sizes_of_one_are_accepted() -> None:
    config = RecurrentConfig(vocab_size=1, hidden_size=1, exit_dim=1)
    assert (config.vocab_size, config.hidden_size, config.exit_dim) == (1, 1, 1)


@pytest.mark.parametrize("value", [-1, 1.0, "1", None])
def test_number_of_draft_layers_must_be_a_non_negative_integer(value: object) -> None:
    with pytest.raises(ConfigError, match=rf"num_draft_layers .* at least 0, got {value!r}"):
        RecurrentConfig.from_dict({**SIZES, "num_draft_layers": value})


def test_a_head_without_draft_layers_is_accepted() -> None:
    assert RecurrentConfig(**SIZES, num_draft_layers=0).num_draft_layers == 0


@pytest.mark.parametrize(("exit_dim", "expected"), [(15, True), (16, False), (17, True), (8, True)])
def test_input_projection_exists_unless_exit_dim_is_twice_the_hidden_size(
    exit_dim: int, expected: bool
) -> None:
    config = RecurrentConfig(vocab_size=32, hidden_size=8, exit_dim=exit_dim)
    assert config.has_input_projection is expected


def test_from_dict_reads_apples_keys_and_ignores_those_of_transformers() -> None:
    values = {
        **SIZES,
        "num_draft_layers": 2,
        "num_lookback_tokens": 3,
        "rnn": False,
        "model_type": "recurrent_drafting_drafter",
        "architectures": ["Drafter"],
        "torch_dtype": "float32",
        "transformers_version": "4.38.2",
    }
    assert RecurrentConfig.from_dict(values) == RecurrentConfig(
        vocab_size=32,
        hidden_size=8,
        exit_dim=16,
        num_draft_layers=2,
        num_lookback_tokens=3,
        rnn=False,
    )


@pytest.mark.parametrize("names", [["vocab_size"], ["hidden_size", "exit_dim"], list(SIZES)])
def test_from_dict_names_all_missing_sizes(names: list[str]) -> None:
    values = {name: size for name, size in SIZES.items() if name not in names}
    with pytest.raises(ConfigError, match=f"lacks {', '.join(names)}"):
        RecurrentConfig.from_dict(values)


@pytest.mark.parametrize("num_speculative_tokens", [1, 127])
def test_limits_of_num_speculative_tokens_are_accepted(num_speculative_tokens: int) -> None:
    config = ReDrafterConfig(num_speculative_tokens)
    assert config.num_speculative_tokens == num_speculative_tokens


@pytest.mark.parametrize("value", [0, -1, 128, True, 16.0, "16", None])
def test_num_speculative_tokens_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ReDrafterConfig(value)
    limit = "between 1 and 127 (tree nodes per request and step, the root not counted)"
    assert f"num_speculative_tokens must be {limit}, got {value!r}" in str(error.value)
    assert "to decode without speculation, leave the speculative config out" in str(error.value)


@pytest.mark.parametrize("beam_width", [1, 50])
def test_limits_of_beam_width_are_accepted(beam_width: int) -> None:
    assert ReDrafterConfig(16, beam_width=beam_width).beam_width == beam_width


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        *[(value, "at least 1") for value in (0, -1, True, "4", None)],
        (51, "at most 50"),
    ],
)
def test_beam_width_out_of_range_is_refused(value: Any, limit: str) -> None:
    with pytest.raises(ConfigError, match=rf"beam_width must be .*{limit}.*, got {value!r}"):
        ReDrafterConfig(16, beam_width=value)


@pytest.mark.parametrize("beam_length", [1, 127])
def test_limits_of_beam_length_are_accepted(beam_length: int) -> None:
    assert ReDrafterConfig(16, beam_length=beam_length).beam_length == beam_length


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        *[(value, "at least 1") for value in (0, -1, True, 5.0, None)],
        (128, "at most 127"),
    ],
)
def test_beam_length_out_of_range_is_refused(value: Any, limit: str) -> None:
    with pytest.raises(ConfigError, match=rf"beam_length must be .*{limit}.*, got {value!r}"):
        ReDrafterConfig(16, beam_length=value)


@pytest.mark.parametrize("tree", ["explored", "beams"])
def test_both_kinds_of_tree_are_accepted(tree: Any) -> None:
    assert ReDrafterConfig(16, tree=tree).tree == tree


@pytest.mark.parametrize("tree", ["prefix", "Beams", "", None, ["beams"]])
def test_an_unknown_tree_is_refused_and_the_known_ones_are_named(tree: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ReDrafterConfig(16, tree=tree)
    assert f"tree must be one of explored, beams, chain, got {tree!r}" in str(error.value)


@pytest.mark.parametrize("matches", [-1, 5, 1.0, True, "2"])
def test_a_number_of_context_matches_out_of_range_is_named(matches: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ReDrafterConfig(16, context_matches=matches)
    assert "context_matches must be between 0 and 4 (" in str(error.value)
    assert repr(matches) in str(error.value)


@pytest.mark.parametrize("candidates", [-1, 31, 513, True, 64.0, "64"])
def test_a_number_of_candidates_out_of_range_is_named(candidates: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ReDrafterConfig(16, candidates=candidates)
    assert "candidates must be 0, or between 32 and 512 (" in str(error.value)
    assert repr(candidates) in str(error.value)


def test_candidates_are_as_many_as_beams_at_least() -> None:
    assert ReDrafterConfig(16, beam_width=40, candidates=40).candidates == 40
    with pytest.raises(ConfigError, match="between 40 and 512"):
        ReDrafterConfig(16, beam_width=40, candidates=39)


def test_a_path_is_no_longer_than_a_step_can_verify() -> None:
    assert [ReDrafterConfig(k).path_length for k in (3, 8, 12)] == [3, 8, 8]


def test_a_search_explores_width_times_length_nodes() -> None:
    assert ReDrafterConfig(16, beam_width=4, beam_length=5).max_explored == 20


def test_own_keys_are_those_unknown_to_vllm() -> None:
    own = ("beam_width", "beam_length", "tree", "adaptive", "context_matches")
    assert ReDrafterConfig.own_keys() == (*own, "candidates")


def test_config_errors_are_value_errors() -> None:
    assert issubclass(ConfigError, ValueError)


def test_a_large_draft_vocabulary_is_advised_against() -> None:
    large = RecurrentConfig(128_256, 8, 8)
    assert large.advice is not None
    assert "128,256 tokens" in large.advice and "--draft-vocab-size 32768" in large.advice
    assert RecurrentConfig(128_256, 8, 8, draft_vocab_size=32_768).advice is None
    assert RecurrentConfig(65_535, 8, 8).advice is None
    assert RecurrentConfig(65_536, 8, 8).advice is not None
    assert RecurrentConfig(65_536, 8, 8, selector=SelectorConfig(4, 2)).advice is None
