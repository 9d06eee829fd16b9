"""Methods and shapes: which engines a comparison needs."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import pytest
from throughput_parts.methods import NGRAM, InputError, plan, with_random_drafter


def test_a_method_gets_one_engine_for_all_its_levels() -> None:
    plain, ngram, redrafter, adaptive = plan("drafter", [4, 1, 4], ["2x4:6"], ["4x5:12"], [NGRAM])

    assert (plain.label, plain.levels, plain.speculative_config) == ("plain", (1, 4), None)
    assert (ngram.label, ngram.levels) == ("ngram 5", (1, 4))
    assert ngram.speculative_config == NGRAM
    assert (redrafter.label, redrafter.levels) == ("ReDrafter 2x4:6", (1, 4))
    assert redrafter.speculative_config == {
        "model": "drafter",
        "num_speculative_tokens": 6,
        "beam_width": 2,
        "beam_length": 4,
        "adaptive": False,
        "num_speculative_tokens_per_batch_size": [[1, 1, 6]],
    }
    assert (adaptive.label, adaptive.levels) == ("adaptive 4x5:12", (1, 4))
    assert adaptive.speculative_config == {
        "model": "drafter",
        "num_speculative_tokens": 12,
        "beam_width": 4,
        "beam_length": 5,
        "adaptive": True,
    }


def test_shapes_are_measured_with_each_number_of_matches() -> None:
    methods = plan("drafter", [1], ["2x4:6"], ["4x5:12"], [], [2, 0, 2])

    assert {m.label: (m.speculative_config or {}).get("context_matches") for m in methods} == {
        "plain": None,
        "ReDrafter 2x4:6, matches 2": 2,
        "adaptive 4x5:12, matches 2": 2,
        "ReDrafter 2x4:6, matches 0": 0,
        "adaptive 4x5:12, matches 0": 0,
    }


def test_matches_alone_have_no_drafter() -> None:
    methods = plan("d", [4, 1], ["2x4:6"], ["4x5:12", "2x2:12", "1x3:3"], matches_alone=True)

    alone = [method for method in methods if method.name == "matches alone"]
    assert [method.label for method in alone] == ["matches alone 12", "matches alone 3"]
    assert alone[0].speculative_config == {
        "method": "redrafter",
        "num_speculative_tokens": 12,
    }
    assert alone[0].levels == (1, 4)
    assert alone[0].is_adaptive and alone[0].drafts_with_redrafter


def test_a_random_drafter_is_measured_adaptively() -> None:
    methods = plan("drafter", [1, 4], ["2x4:6"], ["4x5:12", "1x3:3", "4x5:12"], [NGRAM])
    large, small = with_random_drafter(methods, "random")

    assert (large.label, small.label) == ("random drafter 4x5:12", "random drafter 1x3:3")
    (adaptive,) = [method for method in methods if method.label == "adaptive 4x5:12"]
    assert large.levels == adaptive.levels
    assert large.speculative_config == {**(adaptive.speculative_config or {}), "model": "random"}


def test_shapes_are_measured_at_the_level_they_are_bound_to() -> None:
    shapes = ["1=3x5:12", "8=1x3:3", "1=1x3:3", "2x4:6"]
    methods = plan("drafter", [1, 4, 8], shapes, [], [NGRAM])

    assert {m.label: m.levels for m in methods} == {
        "plain": (1, 4, 8),
        "ngram 5": (1, 4, 8),
        "ReDrafter 3x5:12": (1,),
        "ReDrafter 1x3:3": (1, 8),
        "ReDrafter 2x4:6": (1, 4, 8),
    }


def test_vllm_s_own_methods_are_named_after_their_models_and_tokens() -> None:
    eagle = {"method": "eagle3", "model": "/models/EAGLE-Llama", "num_speculative_tokens": 3}
    suffix = {"method": "suffix", "num_speculative_tokens": 12}
    methods = plan("drafter", [4, 1], ["2x4:6"], [], [eagle, suffix])

    assert [m.label for m in methods[1:3]] == ["eagle3 EAGLE-Llama, 3", "suffix 12"]
    assert [m.speculative_config for m in methods[1:3]] == [eagle, suffix]
    assert all(m.levels == (1, 4) and not m.drafts_with_redrafter for m in methods[1:3])


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([{"num_speculative_tokens": 3}], "'method' must name one of vLLM's own, .* got None"),
        ([{"method": "redrafter", "num_speculative_tokens": 3}], "vLLM's own, .* got 'redrafter'"),
        ([{"method": "adaptive", "num_speculative_tokens": 3}], "vLLM's own, .* got 'adaptive'"),
        ([{"method": "suffix"}], "suffix's num_speculative_tokens must be .* got None"),
        ([{"method": "suffix", "num_speculative_tokens": 0}], "at least 1, got 0"),
        ([NGRAM, NGRAM], "ngram 5 is given twice"),
    ],
)
def test_a_method_that_a_table_could_not_tell_apart_is_refused(
    others: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        plan("drafter", [1], ["2x4:6"], [], others)


def test_sampled_output_of_vllm_s_own_methods_is_left_out_on_cpus() -> None:
    plain, ngram, redrafter = plan("drafter", [1], ["2x4:6"], [], [NGRAM])
    for method in (plain, redrafter):
        assert method.temperatures([0, 0.7], is_cpu=True) == [0, 0.7]
    assert ngram.temperatures([0, 0.7], is_cpu=True) == [0]
    assert ngram.temperatures([0, 0.7], is_cpu=False) == [0, 0.7]


@pytest.mark.parametrize("shape", ["", "2x4", "2:4x6", "2x4:6:8", "x4:6", "-1x4:6", "=2x4:6"])
def test_a_malformed_shape_is_refused(shape: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"expected (WxL:K|an integer)"):
        plan("drafter", [1], [shape], [], [])


def test_a_shape_that_redrafter_refuses_is_refused_here() -> None:
    with pytest.raises(ArgumentTypeError, match=r"'2x4:128': .* between 1 and 127"):
        plan("drafter", [1], ["2x4:128"], [], [])


def test_a_level_that_is_not_measured_cannot_be_bound() -> None:
    with pytest.raises(InputError, match="concurrency 2, which is not measured"):
        plan("drafter", [1, 4], ["2x4:6", "2=1x3:3"], [], [])


def test_a_level_without_a_shape_is_refused() -> None:
    with pytest.raises(InputError, match="nothing is given for concurrency 4"):
        plan("drafter", [1, 4], ["1=2x4:6"], [], [])
