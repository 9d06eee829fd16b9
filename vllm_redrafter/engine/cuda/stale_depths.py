# SPDX-License-Identifier: Apache-2.0
"""The depths of drafted nodes, where the host can read them a step later without waiting.

vLLM brings confidences to the host in two buffers in turn: one is read while the other is written.
Depths go the same way, in the same turns and behind the same events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu.async_utils import stream


class StaleDepths:
    """Depths as they were one recording ago."""

    def __init__(self, depths: Tensor, copy_stream: Any) -> None:
        """
        Args:
            depths: [slots, K] int32 on the device, by slot: what drafts write.
            copy_stream: vLLM's, of its copies to the host.
        """
        self._depths, self._copy_stream = depths, copy_stream
        self._buffers = [
            CpuGpuBuffer(*depths.shape, dtype=depths.dtype, device=depths.device) for _ in range(2)
        ]
        self._readable = 0

    def record(self, event: Any, new: Sequence[int]) -> None:
        """Begin to copy what the last draft wrote; what the call before copied can be read now.

        Args:
            event: vLLM's, of the copy of confidences that it has just begun, in the same turn. It
                waits for it before the next.
            new: slots whose requests are not those of the draft that can be read now.
        """
        self._readable ^= 1
        self._buffers[self._readable].np[new] = 0
        copied = self._buffers[self._readable ^ 1]
        copied.gpu.copy_(self._depths)
        current = torch.cuda.current_stream(self._depths.device)
        self._copy_stream.wait_stream(current)
        with stream(self._copy_stream, current):
            copied.copy_to_cpu()
            event.record()

    def read(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """[R, K], of these slots [R]; 0 where there is no node."""
        depths: npt.NDArray[np.int32] = self._buffers[self._readable].np[slots]
        return depths
