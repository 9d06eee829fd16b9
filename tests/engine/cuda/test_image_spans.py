# SPDX-License-Identifier: Apache-2.0
"""PrefixLM: of which images a step reads a token."""

from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_redrafter.engine.cuda.image_spans import Spans, spans_read

IMAGES: Spans = {0: [(3, 18)], 1: [(5, 20), (30, 45)], 2: []}


def step(lengths: list[int], rows: list[int], reading: list[bool]) -> CommonAttentionMetadata:
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
        mm_req_doc_ranges=IMAGES,
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
    found = spans_read(step(lengths, rows, reading))
    assert (found and {request: spans for request, spans in found.items() if spans}) == expected
