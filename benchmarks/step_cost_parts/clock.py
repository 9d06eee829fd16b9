"""A clock in the worker's process: events around the parts of every decoding step.

It is put around methods of vLLM's model runner, from outside: the engine has no code for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from vllm_redrafter.budget.stats import HostEvent

PARTS = ("verify", "accept", "compact", "draft")


class Event(Protocol):
    """What torch.cuda.Event offers."""

    def record(self) -> None: ...

    def elapsed_time(self, end: Any) -> float: ...


def cuda_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)


class StepClock:
    """Records events; reads them when asked, once the device is done.

    A step's parts: `verify` is the target's forward pass with what prepares it, `accept` sampling
    and the walk, `compact`, and `draft`. From one step's begin to the next's is the step; what
    no part accounts for, mostly the device's waiting for the host, is its gap.
    """

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self.new_event = new_event
        self._begin: Event | None = None
        self._batch: tuple[int, int] = (0, 0)
        self._events: list[tuple[Event, tuple[int, int], dict[str, list[tuple[Event, Event]]]]] = []

    def begin(self, requests: int, prompt_tokens: bool) -> None:
        """A step begins, with this many requests; `prompt_tokens` says that it reads a prompt."""
        begin = self.new_event()
        begin.record()
        self._events.append((begin, (requests, int(prompt_tokens)), {}))

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time added to the current step's part."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, after = self.new_event(), self.new_event()
            before.record()
            result = call(*args, **kwargs)
            after.record()
            if self._events:
                self._events[-1][2].setdefault(part, []).append((before, after))
            return result

        return wrapped

    def read(self, requests: int) -> list[dict[str, float]]:
        """Milliseconds of each decoding step with this many requests: parts, `step`, `gap`."""
        steps = []
        for (begin, batch, parts), (end, following, _) in zip(
            self._events, self._events[1:], strict=False
        ):
            if batch != (requests, 0) or following != (requests, 0):
                continue
            times = {
                part: sum(before.elapsed_time(after) for before, after in parts.get(part, []))
                for part in PARTS
            }
            # Compaction is called by the scorer.
            times["accept"] -= times["compact"]
            times["step"] = begin.elapsed_time(end)
            times["gap"] = times["step"] - sum(times[part] for part in PARTS)
            steps.append(times)
        self._events.clear()
        return steps


def install(worker: Any, on_host: bool = False) -> None:
    """For `collective_rpc`: start the clock in the worker's process; the host's for tests."""
    runner = worker.model_runner
    clock = worker.step_clock = StepClock(HostEvent if on_host else cuda_event)
    execute = clock.timed("verify", runner.execute_model)

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        reads_prompt = any(n != 1 + len(drafts.get(r, ())) for r, n in scheduled.items())
        if scheduled:
            clock.begin(len(scheduled), bool(scheduler_output.scheduled_new_reqs) or reads_prompt)
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    runner.sample = clock.timed("accept", runner.sample)
    if getattr(runner, "speculator", None) is not None:
        runner.speculator.propose = clock.timed("draft", runner.speculator.propose)
        runner.model_state.compact = clock.timed("compact", runner.model_state.compact)


def read(worker: Any, requests: int, on_host: bool = False) -> list[dict[str, float]]:
    """For `collective_rpc`: what the clock has measured since it was last read."""
    if not on_host:
        import torch

        torch.cuda.synchronize()
    steps: list[dict[str, float]] = worker.step_clock.read(requests)
    return steps
