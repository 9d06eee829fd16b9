# SPDX-License-Identifier: Apache-2.0
"""Sizes of CUDA graphs: close enough to each other, and as few as that takes."""

import pytest

from vllm_redrafter.engine.cuda.graph_sizes import Tier, sizes_beyond, tiers


@pytest.mark.parametrize(
    ("covered", "most", "unit"), [(507, 3328, 13), (0, 1024, 1), (512, 16384, 1), (20, 91, 13)]
)
def test_no_batch_is_padded_by_more_than_an_eighth_or_a_unit(
    covered: int, most: int, unit: int
) -> None:
    sizes = sizes_beyond(covered, most, unit)
    assert sizes[-1] == most and all(size % unit == 0 for size in sizes)
    before = covered // unit * unit
    for size in sizes:
        assert before < size <= max(before * 9 // 8, before + unit)
        before = size


def test_twice_the_rows_take_six_sizes_more() -> None:
    assert [len(sizes_beyond(512, 512 << octaves, 1)) for octaves in (1, 2, 3, 4)] == [
        6,
        12,
        18,
        24,
    ]


@pytest.mark.parametrize(("covered", "most"), [(512, 512), (512, 520), (520, 512), (0, 12)])
def test_what_is_covered_needs_none(covered: int, most: int) -> None:
    assert sizes_beyond(covered, most, 13) == ([520] if most == 520 else [])


def test_a_tier_is_the_batches_of_one_k() -> None:
    assert tiers([8, 8, 3, 3, 3, 0]) == [Tier(9, 1, 2), Tier(4, 3, 5), Tier(1, 6, 6)]
    assert tiers([2, 5, 2]) == [Tier(3, 1, 3), Tier(6, 2, 2)]
