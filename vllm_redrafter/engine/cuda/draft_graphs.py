# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of drafts: one for each batch size and length.

To vLLM's dispatch a graph is of so many rows per request. A draft has one, and what its graphs
differ in is the number of levels that they search: that number takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_redrafter.engine.cuda.graph_manager import BatchGraphManager


class DraftGraphManager(BatchGraphManager):
    """The draft's graphs."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        mode: CUDAGraphMode,
        lengths: Sequence[int],
    ) -> None:
        """For drafts of these lengths."""
        self._lengths = lengths
        super().__init__(vllm_config, device, mode, decode_query_len=1)

    def _variants(self, desc: BatchExecutionDescriptor) -> Sequence[BatchExecutionDescriptor]:
        return [replace(desc, uniform_token_count=length) for length in self._lengths]

    def dispatch_draft(self, requests: int, length: int) -> BatchExecutionDescriptor:
        """The smallest graph of this length for so many requests; or none, for so many."""
        return self.dispatch(requests, requests, length, num_active_loras=0)


def length_of(desc: BatchExecutionDescriptor) -> int:
    """How many levels the graph's draft searches."""
    assert desc.uniform_token_count is not None
    return desc.uniform_token_count
