# SPDX-License-Identifier: Apache-2.0
"""The stopwatch: CUDA events, CUDA graphs, a cache flush. The only part that no test runs."""

import subprocess
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

WARM_UPS = 5
cuda: Any = torch.cuda  # its classes are untyped where torch is built without CUDA


class Gpu:
    """The current CUDA device.

    Every launch is timed by itself, by a pair of events, with the L2 cache flushed before: a buffer
    of eight times its size is read, which leaves no dirty lines to be written back in the time
    measured. The host is ahead of the device meanwhile, so that a graph's launch is not waited for.
    """

    def __init__(self, repeats: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.repeats = repeats
        properties = torch.cuda.get_device_properties(self.device)
        self.name: str = properties.name
        self._flushed = torch.zeros(8 * properties.L2_cache_size // 4, device=self.device)

    def in_graph(self, launch: Callable[[], object]) -> float:
        """Microseconds, the median: replayed from a CUDA graph, as an engine's decoding step is."""
        _warm_up(launch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        _warm_up(graph.replay)
        pairs = []
        for _ in range(self.repeats):
            before, after = (cuda.Event(enable_timing=True) for _ in range(2))
            self._flushed.sum()
            before.record()
            graph.replay()
            after.record()
            pairs.append((before, after))
        torch.cuda.synchronize()
        return 1000 * median(before.elapsed_time(after) for before, after in pairs)

    def copy_bandwidth(self) -> float:
        """GB/s of a large copy on the device, bytes read and written."""
        torch.cuda.empty_cache()
        size = min(2 << 30, torch.cuda.mem_get_info(self.device)[0] // 4)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        copy = torch.empty_like(source)
        return 2 * size / self.in_graph(lambda: copy.copy_(source)) / 1000


def _warm_up(launch: Callable[[], object]) -> None:
    # On a stream of its own, as graph capture asks for.
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def software() -> dict[str, str | None]:
    """The versions of CUDA and of the driver; "unknown" where nobody tells."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        driver = found.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {"driver": driver, "cuda": torch.version.cuda}
