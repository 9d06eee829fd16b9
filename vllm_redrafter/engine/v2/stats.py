# SPDX-License-Identifier: Apache-2.0
"""Step statistics that never wait for the device; times are recorded from the first `reset` on."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.engine.published import Publisher

cuda: Any = torch.cuda  # its classes are untyped where torch is built without CUDA


class StepTimer:
    """Fills StepStats; `attention` stays 0, being inside the forward pass's CUDA graph.

    Attributes:
        counts: [7] int64 on the device, added to by the kernels that see the nodes: as of
            `AcceptedPaths`, then as of `observe_matches`.
        publisher: takes the counters after each step; None where no front end reads them.
        stats: what is known on the host; `read` adds the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._enabled = False
        self.stats = StepStats()
        self.counts = torch.zeros(7, dtype=torch.int64, device=device)
        # The same on the host, as they were when they were copied last.
        self._copy = torch.zeros(7, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = cuda.Event()
        self.publisher: Publisher | None = None
        self._pending: deque[tuple[str, Any, Any]] = deque()

    def reset(self) -> None:
        """Zero everything, and record from now on."""
        before = self.read()
        if self.publisher is not None:
            self.publisher.carry(before)
        self.stats.reset()
        self.counts.zero_()
        self._copy.zero_()
        self._enabled = True

    def read(self) -> StepStats:
        """Sums since the last reset; waits for the device."""
        self._settle(wait=True)
        self._take(self.counts)
        return self.stats

    def _take(self, counts: Tensor) -> None:
        stats, values = self.stats, counts.tolist()
        stats.verifications, stats.drafted_tokens, stats.sampled_tokens = values[:3]
        stats.matched_tokens, stats.accepted_matched_tokens = values[3:5]
        stats.earlier_tokens, stats.accepted_earlier_tokens = values[5:]

    def publish(self) -> None:
        """Hand the counts to the front end; the device's are those of the last finished copy."""
        if self.publisher is None:
            return
        if self._copied.query():
            self._take(self._copy)
            self._copy.copy_(self.counts, non_blocking=True)
            self._copied.record()
        self.publisher.publish(self.stats)

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

    def _settle(self, wait: bool) -> None:
        """Turn finished pairs of events, or all, into seconds."""
        while self._pending and (wait or self._pending[0][2].query()):
            part, begin, end = self._pending.popleft()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1000
            setattr(self.stats, part, getattr(self.stats, part) + seconds)
