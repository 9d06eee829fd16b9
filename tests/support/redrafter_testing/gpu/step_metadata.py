# SPDX-License-Identifier: Apache-2.0
"""A step's attention metadata, of plain numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.engine.v2.attention import TreeAttentionMetadata

OF_DECODING = (
    "seq_threshold_3D",
    "num_par_softmax_segments",
    "softmax_segm_output",
    "softmax_segm_max",
    "softmax_segm_expsum",
)
"""Triton's buffers for splitting keys of plain decodes; None does without."""


def step_metadata(
    rows: Sequence[int], lengths: Sequence[int], block_table: Tensor
) -> TreeAttentionMetadata:
    """As vLLM builds it; `rows` of each request, `lengths` with the context."""

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=block_table.device)

    buffers: Any = dict.fromkeys(OF_DECODING)
    return TreeAttentionMetadata(
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        query_start_loc=integers([0, *torch.tensor(rows).cumsum(0).tolist()]),
        max_seq_len=max(lengths),
        seq_lens=integers(lengths),
        block_table=block_table,
        slot_mapping=integers([]),
        causal=True,
        **buffers,
    )
