"""What a stopwatch offers, apart from the GPU that it needs: stand-ins for it can be tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """See `shared_parts.gpu.Gpu`, of which this is what measuring needs."""

    device: torch.device

    @property
    def free_bytes(self) -> int: ...

    def in_graph(self, launch: Callable[[], object]) -> float: ...

    def copy_bandwidth(self) -> float: ...
