# SPDX-License-Identifier: Apache-2.0
"""What steps take, from begin to begin: known to the host without another wait for the device.

The host is at most a step ahead of the device. Where it waited for the step before, the device sets
the pace; elsewhere the host does. Tables that are measured at start-up know the target's pass and
the draft alone. So a step takes max(floor, table + rest): the floor is the host's time, the rest
what the device does beside the tables.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from vllm_redrafter.budget.choice import Floats
from vllm_redrafter.budget.costs import MEMORY, bucket
from vllm_redrafter.budget.planner import BLOCK

NOTHING = 0.0, 0.0
"""The floor and the rest of what was never run."""
WAITED = 0.05
"""Share of a step's time from which on the host waits for the device, which sets the pace."""
Kind = tuple[bool, bool, bool]
"""Steps that take alike: do they draft, verify nodes, read prompts?"""


class StepTimes:
    """Milliseconds of steps by kind and number of requests: medians, renewed as arms are chosen.

    `began` is when the running step began, in ms, and `waited` how long its host has waited for the
    device; `medians` are of steps that were run, by kind and bucket of requests.
    """

    def __init__(self, agree: Callable[[Any], Any]) -> None:
        """`agree` gives each rank of a tensor-parallel group what the first one passes."""
        self._agree = agree
        # [floors, rests] by kind and bucket of requests; and their medians of a while ago.
        self._samples: defaultdict[Any, list[deque[float]]] = defaultdict(
            lambda: [deque(maxlen=MEMORY), deque(maxlen=MEMORY)]
        )
        self.medians: dict[Any, tuple[float, float]] = {}
        self._renewed: set[Any] = set()
        # Of the running step: kind and bucket, milliseconds by the tables, begin.
        self._at: Any = None
        self._table = self.began = self.waited = 0.0
        self._before: Any = None
        self._steps = 0

    def ended(self, now: float, counts: bool, judged: deque[Any]) -> list[Any]:
        """The running step is over, as the next begins, at `now` in ms; or the engine was idle.

        `judged` is taken by all ranks where they agree on what they know, and then returned.
        """
        period = now - self.began
        if self._at is not None and counts and period > 0:
            floors, rests = self._samples[self._at]
            floors.append(period - self.waited)
            rest = period - self._table
            # Without a wait for a step like this one, it is known that the device takes no longer.
            if self.waited <= WAITED * period or self._before != self._at:
                rest = min(rest, self.medians.get(self._at, NOTHING)[1])
            rests.append(rest)
            self._renewed.add(self._at)
        self._before, self._at, self.waited = self._at, None, 0.0
        self._steps += 1
        if self._steps % BLOCK:
            return []
        new = {at: tuple(map(median, self._samples[at])) for at in self._renewed}
        self._renewed.clear()
        taken = [judged.popleft() for _ in range(len(judged))]
        new, taken = self._agree((new, taken))
        self.medians.update(new)
        return taken

    def begins(self, now: float, kind: Kind, requests: int, table: float) -> None:
        """A step of this kind begins at `now` in ms; it takes `table` ms by the tables."""
        self._at, self.began, self._table = (kind, bucket(requests)), now, table

    def milliseconds(self, kind: Kind, requests: int, table: Floats) -> Floats:
        """Of steps that take `table` ms by the tables: as those of the nearest number of requests.

        Of a kind that was never run, the tables' alone: nothing takes less.
        """
        here = bucket(requests)
        sizes = [size for of, size in self.medians if of == kind]
        if not sizes:
            return table
        floor, rest = self.medians[kind, min(sizes, key=lambda size: abs(size - here))]
        return np.maximum(floor, table + rest)
