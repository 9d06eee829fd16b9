# SPDX-License-Identifier: Apache-2.0
"""Into how many parts tree attention splits the keys: planned on the host, cut on the device.

The host knows how many programs a launch has and how long a context may become; it plans for the
longest, as a CUDA graph is captured before any length is known. The device knows each request's
true range of keys, from the first that a sliding window leaves visible to the tree's last, and cuts
that. Programs of parts that a request does not need return at once.

The numbers follow from arithmetic; none of them has been timed.
"""

from dataclasses import dataclass

import torch
import triton

MOST_PARTS = 64
PART_BYTES = 2**27
"""What the parts' results may take; vLLM does not know of them when it sizes the KV cache."""


PROGRAMS_PER_MULTIPROCESSOR = 2
"""There are so many parts that a launch has as many programs."""

MIN_KEYS = 256
"""Of a part. With fewer, its results, in fp32, are as large as the K and V that it reads."""

MAX_KEYS = 2048
"""Of a part, as long as there are parts left: its program reads them one tile after another, and
the whole step waits for the longest."""

LONG_CONTEXT_PARTS = 8
"""Planned where contexts may become long, however many programs there are. More would shorten the
longest, but in most steps their programs are started in vain."""


@dataclass(frozen=True)
class KeySplit:
    """How requests' keys are split; `_keys_per_part` in tree_attention_kernels.py does it.

    Attributes:
        parts: the most that there are for a request. The launch has programs and memory for them.
        even_parts: how many a request's keys are split into if that leaves each part
            `min_keys` or more and at most `max_keys`.
        min_keys: fewer keys than that are not split off.
        max_keys: above it there are more parts than `even_parts`, up to `parts`.
    """

    parts: int
    even_parts: int
    min_keys: int
    max_keys: int

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """As the kernels take them."""
        return self.parts, self.even_parts, self.min_keys, self.max_keys


def plan_split(programs: int, max_keys: int, bytes_per_part: int, device: torch.device) -> KeySplit:
    """Enough programs for all multiprocessors, and more for contexts that are long.

    Args:
        programs: how many the launch has for each part, at least.
        max_keys: how many keys a request may have at most, its tree included.
        bytes_per_part: what one part's results take, of all rows and query heads.
        device: where it runs.
    """
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), programs)
    even = _power_of_two(min(wanted, max_keys // MIN_KEYS, MOST_PARTS))
    for_long = min(max_keys // MAX_KEYS, LONG_CONTEXT_PARTS)
    most = _power_of_two(min(max(even, for_long), PART_BYTES // bytes_per_part))
    return KeySplit(most, min(even, most), MIN_KEYS, MAX_KEYS)


def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; a CPU counts as one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _power_of_two(number: int) -> int:
    """Rounded down, to 1 at least: the merging kernel is compiled for each number of parts."""
    return 1 << (max(1, number).bit_length() - 1)
