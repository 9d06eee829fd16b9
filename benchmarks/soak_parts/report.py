# SPDX-License-Identifier: Apache-2.0
"""What a soak found, and whether it is well."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SHOWN = 10
"""Differences and errors that are listed; all are counted."""

MOST_GROWTH = 50.0
"""MiB that memory may grow by in the second half, beyond plain vLLM's."""


@dataclass
class Report:
    """The figures of a run; seconds, and counts of requests unless something else is said.

    Attributes:
        sent: requests that went out.
        answered: those that ended by themselves; every one of them was compared.
        aborted: those whose client went away.
        errors: what the server said to those that it did not answer.
        preemptions: requests that the scheduler threw out of the KV cache, each time counted.
        offered_rate: requests per second that arrived.
        seconds: from the first arrival to the last end.
        counters: steps, verifications and so on, of the server's metrics.
        free_blocks: of the KV cache, before and after.
        memory: MiB of the server's processes, midway and after. In the first half it grows with
            each size of a step and each kind of request that comes for the first time.
        plain_memory: plain vLLM's, midway and after it was asked the same.
        differences: from plain vLLM: what was asked for, and what differs.
    """

    sent: int
    answered: int
    aborted: int
    errors: list[str]
    preemptions: int
    offered_rate: float
    seconds: float
    counters: dict[str, float]
    free_blocks: tuple[int, int]
    memory: tuple[float, float]
    plain_memory: tuple[float, float] = (0.0, 0.0)
    differences: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Of the memory, beyond what plain vLLM's grew by.

        That grows, too: by allocators' arenas, compiled grammars, hashes of blocks.
        """
        (ours, ours_after), (plain, plain_after) = self.memory, self.plain_memory
        return (ours_after - ours) - (plain_after - plain)

    def failures(self) -> list[str]:
        """What must not be; nothing if all is well."""
        found = []
        if self.errors:
            found.append(f"{len(self.errors)} requests were not answered")
        if self.differences:
            found.append(f"{len(self.differences)} answers differ from plain vLLM's")
        if self.free_blocks[1] < self.free_blocks[0]:
            found.append(f"{self.free_blocks[0] - self.free_blocks[1]} KV blocks were not freed")
        if self.growth > MOST_GROWTH:
            found.append(
                f"memory grew by {self.growth:.0f} MiB more than plain vLLM's, and at most "
                f"{MOST_GROWTH:g} were allowed"
            )
        if not self.answered:
            found.append("no request was answered")
        return found

    def as_json(self) -> dict[str, Any]:
        """All of it, the lists shortened."""
        values = asdict(self)
        for name in ("errors", "differences"):
            values[name] = {"count": len(values[name]), "first": values[name][:SHOWN]}
        return {**values, "failures": self.failures()}

    def lines(self) -> list[str]:
        """For a reader."""
        counted = ", ".join(f"{name} {value:.0f}" for name, value in self.counters.items())
        listed = [f"  {what}" for what in (self.errors[:SHOWN] + self.differences[:SHOWN])]
        memory, plain = (f"{a:.0f} → {b:.0f}" for a, b in (self.memory, self.plain_memory))
        return [
            f"requests       {self.sent} in {self.seconds:.0f} s, {self.offered_rate:.1f} a second "
            "arriving",
            f"answered       {self.answered}, each compared with plain vLLM's answer",
            f"differences    {len(self.differences)}",
            f"not answered   {len(self.errors)}",
            *listed,
            f"aborted        {self.aborted}",
            f"preemptions    {self.preemptions}",
            f"speculation    {counted}",
            f"memory         {memory} MiB, plain vLLM's {plain}",
            f"free KV blocks {self.free_blocks[0]} at the start, {self.free_blocks[1]} at the end",
        ]


COUNTERS = {
    "steps": "redrafter:steps_total",
    "verifications": "vllm:spec_decode_num_drafts_total",
    "verified nodes": "vllm:spec_decode_num_draft_tokens_total",
    "accepted nodes": "vllm:spec_decode_num_accepted_tokens_total",
    "generated tokens": "vllm:generation_tokens_total",
}
PREEMPTIONS = "vllm:num_preemptions_total"
USAGE = "vllm:kv_cache_usage_perc"


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What the server counted meanwhile."""
    return {
        name: after.get(metric, 0.0) - before.get(metric, 0.0) for name, metric in COUNTERS.items()
    }
