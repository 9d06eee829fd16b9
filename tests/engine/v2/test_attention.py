# SPDX-License-Identifier: Apache-2.0
"""A batch split into trees and other rows: what the other rows' kernel reads of them."""

from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from redrafter_testing.gpu.step_metadata import step_metadata
from vllm_redrafter.engine.v2.attention import Spans, TreeRows, _spans_read
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
@pytest.mark.parametrize("others", [[30], [6, 1, 40, 2]])
def test_triton_reads_other_rows_as_a_whole_batch(trees: list[int], others: list[int]) -> None:
    """At addresses of the same kind, and never of one request: it would be compiled anew."""
    metadata = split_batch(trees, others)
    plain, rest = metadata.rest, metadata.rest_for_triton()
    assert metadata.rest_for_triton() is rest, "the layers of a group share it"
    for tensor in (rest.query_start_loc, rest.seq_lens, rest.block_table):
        assert tensor.data_ptr() % 16 == 0
    assert rest.block_table.stride() == metadata.block_table.stride()
    requests = len(others)
    assert len(rest.seq_lens) == len(rest.block_table) == requests + 1 > 1
    assert rest.query_start_loc.tolist() == [*plain.query_start_loc.tolist(), sum(others)]
    assert rest.seq_lens.tolist()[:-1] == plain.seq_lens.tolist()
    assert rest.block_table.tolist()[:-1] == plain.block_table.tolist()
    assert rest.num_actual_tokens == sum(others)


def test_triton_reads_other_requests_images_unless_the_target_takes_them_back() -> None:
    """As Gemma 4's global layers do in the step's metadata, while its pass begins."""
    metadata = split_batch([9, 4], [30, 17])
    metadata.mm_prefix_range_tensor = IMAGES
    rest = metadata.rest_for_triton()
    assert rest.mm_prefix_range_tensor.tolist() == [[[4, 19]], [[3, 8]], [[0, 0]]]
    assert rest.mm_prefix_range_tensor.data_ptr() % 16 == 0
    metadata.set_trees(metadata.trees)
    metadata.mm_prefix_range_tensor = None
    assert metadata.rest_for_triton() is not rest, "another step's trees bring other rows"
    assert metadata.rest_for_triton().mm_prefix_range_tensor is None


IMAGES = torch.tensor([[[2, 9]], [[0, 0]], [[4, 19]], [[3, 8]]], dtype=torch.int32)
"""[requests, images, first and last position], as vLLM has them."""


SPANS: Spans = {0: [(3, 18)], 1: [(5, 20), (30, 45)], 2: []}


def image_step(lengths: list[int], rows: list[int], reading: list[bool]) -> CommonAttentionMetadata:
    """Requests of so many rows each, the last of so many tokens."""
    nothing: Any = None
    starts = torch.tensor([0, *rows]).cumsum(0)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths),
        num_reqs=len(rows),
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        max_seq_len=max(lengths),
        block_table_tensor=nothing,
        slot_mapping=nothing,
        is_prefilling=torch.tensor(reading),
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
        mm_req_doc_ranges=SPANS,
    )


@pytest.mark.parametrize(
    ("lengths", "rows", "reading", "expected"),
    [
        ([40, 60, 20], [40, 60, 20], [True] * 3, {0: [(3, 18)], 1: [(5, 20), (30, 45)]}),
        ([50, 60, 20], [9, 60, 20], [False, True, True], {1: [(5, 20), (30, 45)]}),
        ([50, 60, 20], [9, 39, 20], [False, True, True], {1: [(30, 45)]}),
        ([50, 29, 20], [9, 29, 20], [False, True, True], {1: [(5, 20)]}),
        ([50, 60, 20], [9, 14, 20], [False, True, True], None),
        ([50, 60, 40], [9, 9, 9], [False] * 3, None),
    ],
    ids=["all", "beside a tree", "second image", "first image", "behind both", "no prompt"],
)
def test_images_are_named_of_which_a_prompt_s_rows_are_tokens(
    lengths: list[int], rows: list[int], reading: list[bool], expected: Spans | None
) -> None:
    found = _spans_read(image_step(lengths, rows, reading))
    assert (found and {request: spans for request, spans in found.items() if spans}) == expected
