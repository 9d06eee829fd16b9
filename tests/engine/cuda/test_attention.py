# SPDX-License-Identifier: Apache-2.0
"""A batch split into trees and other rows: what the other rows' kernel is told of them."""

from typing import Any

import pytest
import torch

from redrafter_testing.gpu.step_metadata import step_metadata
from vllm_redrafter.engine.cuda.attention import TreeRows
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees

COLUMNS = 6
"""Blocks of a request; of a row of vLLM's table only these are this step's."""


def split_batch(trees: list[int], others: list[int]) -> Any:
    """Metadata of requests of so many rows, the first of which are trees."""
    rows = [*trees, *others]
    table = torch.arange(8 * len(rows), dtype=torch.int32).view(len(rows), 8)
    metadata = step_metadata(rows, [20 + count for count in rows], table[:, :COLUMNS])
    rest = metadata.query_start_loc[len(trees) :] - sum(trees)
    staged = StagedTrees(len(trees), max(trees), torch.device("cpu"))
    metadata.set_trees(TreeRows(staged, len(trees), sum(trees), max(trees), len(trees), rest))
    return metadata


@pytest.mark.parametrize("trees", [[9], [9, 4], [5, 5, 5]])
@pytest.mark.parametrize("others", [[30], [1, 17], [6, 1, 40, 2]])
def test_triton_is_told_of_other_rows_as_of_a_whole_batch(
    trees: list[int], others: list[int]
) -> None:
    """At addresses of the same kind, and never of one request: it would be compiled anew."""
    metadata = split_batch(trees, others)
    plain, told = metadata.rest, metadata.rest_for_triton()
    assert metadata.rest_for_triton() is told, "the layers of a group share it"
    for tensor in (told.query_start_loc, told.seq_lens, told.block_table):
        assert tensor.data_ptr() % 16 == 0
    assert told.block_table.stride() == metadata.block_table.stride()
    requests = len(others)
    assert len(told.seq_lens) == len(told.block_table) == requests + 1 > 1
    assert told.query_start_loc.tolist() == [*plain.query_start_loc.tolist(), sum(others)]
    assert told.seq_lens.tolist()[:-1] == plain.seq_lens.tolist()
    assert told.block_table.tolist()[:-1] == plain.block_table.tolist()
    assert told.num_actual_tokens == sum(others)


IMAGES = torch.tensor([[[2, 9]], [[0, 0]], [[4, 19]], [[3, 8]]], dtype=torch.int32)
"""[requests, images, first and last position], as vLLM has them."""


def test_triton_is_told_of_other_requests_images() -> None:
    metadata = split_batch([9, 4], [30, 17])
    metadata.mm_prefix_range_tensor = IMAGES
    told = metadata.rest_for_triton()
    assert told.mm_prefix_range_tensor.tolist() == [[[4, 19]], [[3, 8]], [[0, 0]]]
    assert told.mm_prefix_range_tensor.data_ptr() % 16 == 0


def test_images_that_the_target_takes_back_are_not_told_of() -> None:
    """Gemma 4's global layers: it clears them in the step's metadata while its pass begins."""
    metadata = split_batch([9, 4], [30, 17])
    metadata.mm_prefix_range_tensor = IMAGES
    metadata.set_trees(metadata.trees)
    metadata.mm_prefix_range_tensor = None
    assert metadata.rest_for_triton().mm_prefix_range_tensor is None


def test_another_step_s_trees_bring_other_rows() -> None:
    metadata = split_batch([9, 4], [30])
    before = metadata.rest_for_triton()
    metadata.set_trees(metadata.trees)
    assert metadata.rest_for_triton() is not before
