# SPDX-License-Identifier: Apache-2.0
"""Which sizes are timed where a machine has no time for all of them."""

from vllm_redrafter.drafting.time_sizes import time_sizes


def test_a_machine_too_slow_to_time_all_sizes_times_two_that_are_far_apart() -> None:
    for most, sizes in ((1, [1]), (13, [1, 13]), (3328, [1, 16])):
        assert [size for size, _ in time_sizes(most, lambda _: None, lambda: None, 0.0)] == sizes
