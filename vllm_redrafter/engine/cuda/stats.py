# SPDX-License-Identifier: Apache-2.0
"""Step statistics that never wait for the device; times are recorded from the first `reset` on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.engine.published import Publisher

cuda: Any = torch.cuda  # its classes are untyped where torch is built without CUDA


class StepTimer:
    """Fills StepStats; `attention` stays 0, being inside the forward pass's CUDA graph.

    Attributes:
        publisher: takes the counters after each step; None where no front end reads them.
        stats: what is known on the host; `read` adds the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._enabled = False
        self.stats = StepStats()
        # Requests verified, their nodes and the tokens output, nodes on paths found in the text and
        # those of them accepted: summed on the device.
        self._counts = torch.zeros(5, dtype=torch.int64, device=device)
        # The same on the host, as they were when they were copied last.
        self._copy = torch.zeros(5, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = cuda.Event()
        self.publisher: Publisher | None = None
        self._pending: deque[tuple[str, Any, Any]] = deque()

    def reset(self) -> None:
        """Zero everything, and record from now on."""
        before = self.read()
        if self.publisher is not None:
            self.publisher.carry(before)
        self.stats.reset()
        self._counts.zero_()
        self._copy.zero_()
        self._enabled = True

    def read(self) -> StepStats:
        """Sums since the last reset; waits for the device."""
        self._settle(wait=True)
        self._take(self._counts)
        return self.stats

    def _take(self, counts: Tensor) -> None:
        stats, (*of_trees, matched, accepted) = self.stats, counts.tolist()
        stats.verifications, stats.drafted_tokens, stats.sampled_tokens = of_trees
        stats.matched_tokens, stats.accepted_matched_tokens = matched, accepted

    def publish(self) -> None:
        """Hand the counts to the front end; the device's are those of the last finished copy."""
        if self.publisher is None:
            return
        if self._copied.query():
            self._take(self._copy)
            self._copy.copy_(self._counts, non_blocking=True)
            self._copied.record()
        self.publisher.publish(self.stats)

    @property
    def _counting(self) -> bool:
        return self._enabled or self.publisher is not None

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the body's time on the device to the field named `part`."""
        if not self._enabled:
            yield
            return
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._pending.append((part, begin, end))
        self._settle(wait=False)

    def count(self, input_batch: InputBatch, num_nodes: Tensor, num_sampled: Tensor) -> None:
        """Count a step's verified trees: num_nodes (roots included) and num_sampled [R] int32."""
        drafted = input_batch.num_draft_tokens_per_req
        if not self._counting or drafted is None:
            return
        scheduled = int(np.count_nonzero(drafted))
        self.stats.steps += 1
        nodes = num_nodes[:scheduled] - 1
        verified = nodes > 0
        of_trees = torch.stack([verified, nodes, num_sampled[:scheduled] * verified])
        self._counts[:3] += of_trees.sum(1)

    def count_matches(self, verified: Callable[[], Tensor]) -> None:
        """Count match nodes; `verified` gives [2] int64: verified and accepted ones."""
        if self._counting:
            self._counts[3:] += verified()

    def _settle(self, wait: bool) -> None:
        """Turn finished pairs of events, or all, into seconds."""
        while self._pending and (wait or self._pending[0][2].query()):
            part, begin, end = self._pending.popleft()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1000
            setattr(self.stats, part, getattr(self.stats, part) + seconds)
