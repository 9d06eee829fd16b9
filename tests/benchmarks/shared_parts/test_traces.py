"""What a trace says about kernels and steps."""

from __future__ import annotations

from typing import Any

from shared_parts.traces import Step, busiest, covered, host_calls, steps


def work(begin: float, duration: float, name: str = "gemm", cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": begin, "dur": duration}


def target_pass(begin: float, duration: float, name: str) -> dict[str, Any]:
    return work(begin, duration, name, "gpu_user_annotation")


def test_kernels_come_by_the_time_of_all_their_calls() -> None:
    kernels = [work(0, dur, name) for name, dur in (("mm", 2000), ("see", 1500), ("see", 1500))]
    others = [{"name": "metadata"}, work(0, 9000, "mm", "cpu_op")]
    assert busiest([*others, *kernels]) == [
        {"name": "see", "calls": 2, "ms": 3.0},
        {"name": "mm", "calls": 1, "ms": 2.0},
    ]
    assert busiest([]) == busiest(others) == []


def test_what_vllm_s_operations_take_the_host_is_the_usual_call() -> None:
    calls = [work(0, dur, "vllm::attend", "cpu_op") for dur in (300, 320, 9000)]
    others = [work(0, 50, "aten::mm", "cpu_op"), work(0, 80, "vllm::attend"), {"name": "vllm::x"}]
    assert host_calls([*others, *calls]) == [
        {"name": "vllm::attend", "calls": 3, "median_us": 320.0}
    ]


def test_a_step_lasts_to_the_next_pass_and_is_busy_while_anything_runs() -> None:
    events = [
        target_pass(5000, 2000, "execute_context_0(0)_generation_2(26)"),
        work(5000, 3000),
        target_pass(1000, 1500, "execute_context_1(63)_generation_0(0)"),
        work(1000, 1000),
        work(1500, 1000, cat="gpu_memcpy"),  # beside the one before, on another stream
        work(3000, 500),
        work(0, 800),  # before the first pass
        work(1000, 4000, cat="cpu_op"),
        target_pass(0, 9000, "something else"),
    ]
    assert steps(events) == [
        Step(1, 63, 0, 0, period=4.0, busy=2.0, forward=1.5),
        Step(0, 0, 2, 26, period=None, busy=3.0, forward=3.0),
    ]
    assert steps(events[1:2]) == []


def test_what_intervals_cover_counts_once() -> None:
    assert covered([]) == 0
    assert covered([(0, 4), (1, 2), (3, 5), (7, 8)]) == 6
