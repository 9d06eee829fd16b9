# SPDX-License-Identifier: Apache-2.0
"""Methods and shapes: which engines a comparison needs."""

from typing import Any

import pytest
from shared_parts.arguments import tree_shape
from throughput_parts.methods import NGRAM, InputError, plan

SMALL, LARGE = tree_shape("2x4:6"), tree_shape("4x5:12")


def test_every_method_and_shape_gets_an_engine() -> None:
    found = plan("drafter", [SMALL], [LARGE], [NGRAM], matches_alone=True, plain_again=True)
    assert {method.label: method.speculative_config for method in found} == {
        "plain": None,
        "plain again": None,
        "ngram 5": NGRAM,
        "matches alone 12": {"method": "redrafter", "num_speculative_tokens": 12},
        "ReDrafter 2x4:6": {
            "model": "drafter",
            "num_speculative_tokens": 6,
            "beam_width": 2,
            "beam_length": 4,
            "adaptive": False,
            "num_speculative_tokens_per_batch_size": [[1, 1, 6]],
        },
        "adaptive 4x5:12": {
            "model": "drafter",
            "num_speculative_tokens": 12,
            "beam_width": 4,
            "beam_length": 5,
            "adaptive": True,
        },
    }


def test_shapes_are_measured_with_each_number_of_matches() -> None:
    methods = plan("drafter", [SMALL], [LARGE], [], [2, 0])

    assert {m.label: (m.speculative_config or {}).get("context_matches") for m in methods} == {
        "plain": None,
        "ReDrafter 2x4:6, matches 2": 2,
        "ReDrafter 2x4:6, matches 0": 0,
        "adaptive 4x5:12, matches 2": 2,
        "adaptive 4x5:12, matches 0": 0,
    }


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([{"num_speculative_tokens": 3}], "'method' must name one of vLLM's own, .* got None"),
        ([{"method": "redrafter", "num_speculative_tokens": 3}], "vLLM's own, .* got 'redrafter'"),
        ([{"method": "suffix", "num_speculative_tokens": 0}], "at least 1, got 0"),
        ([NGRAM, NGRAM], "ngram 5 is given twice"),
    ],
)
def test_a_method_that_a_table_could_not_tell_apart_is_refused(
    others: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        plan("drafter", [SMALL], [], others)


def test_sampled_output_of_vllm_s_own_methods_is_left_out_on_cpus() -> None:
    plain, ngram, redrafter = plan("drafter", [SMALL], [], [NGRAM])
    for method in (plain, redrafter):
        assert method.temperatures([0, 0.7], is_cpu=True) == [0, 0.7]
    assert ngram.temperatures([0, 0.7], is_cpu=True) == [0]
    assert ngram.temperatures([0, 0.7], is_cpu=False) == [0, 0.7]
