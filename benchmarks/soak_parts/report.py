"""What a soak found, and whether it is well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from soak_parts.client import Outcome
from soak_parts.load import Look

SHOWN = 10
"""Differences and errors that are listed; all are counted."""


@dataclass(frozen=True)
class Report:
    """The figures of a run; seconds, MiB, and counts of requests unless something else is said.

    Attributes:
        sent: requests that went out.
        answered: those that ended by themselves; every one of them was compared.
        aborted: those whose client went away.
        errors: what the server said to those that it did not answer.
        differences: from plain vLLM: what was asked for, and what differs.
        preemptions: requests that the scheduler threw out of the KV cache, each time counted.
        offered_rate: requests per second that arrived.
        seconds: from the first arrival to the last end.
        first_token, between_tokens: median and 99th percentile of the streams' seconds.
        counters: steps, verifications and so on, of the server's metrics.
        free_blocks: of the KV cache, before and after.
        looks: at the memory of the server's processes.
        plain_looks: likewise of plain vLLM's, at what it was asked.
        most_growth: of that memory, beyond plain vLLM's.
    """

    sent: int
    answered: int
    aborted: int
    errors: list[str]
    differences: list[str]
    preemptions: int
    offered_rate: float
    seconds: float
    first_token: tuple[float, float]
    between_tokens: tuple[float, float]
    counters: dict[str, float]
    free_blocks: tuple[int, int]
    looks: list[Look]
    plain_looks: list[Look]
    most_growth: float

    @property
    def growth(self) -> float:
        """Of the resident memory, from the start to the end, beyond what plain vLLM's grew by.

        That grows, too: by allocators' arenas, compiled grammars, hashes of blocks.
        """
        ours, plain = (
            looks[-1].total_mib - looks[0].total_mib for looks in (self.looks, self.plain_looks)
        )
        return ours - plain

    def failures(self) -> list[str]:
        """What must not be; nothing if all is well."""
        found = []
        if self.errors:
            found.append(f"{len(self.errors)} requests were not answered")
        if self.differences:
            found.append(f"{len(self.differences)} answers differ from plain vLLM's")
        if self.free_blocks[1] < self.free_blocks[0]:
            found.append(f"{self.free_blocks[0] - self.free_blocks[1]} KV blocks were not freed")
        if self.growth > self.most_growth:
            found.append(
                f"memory grew by {self.growth:.0f} MiB more than plain vLLM's, and at most "
                f"{self.most_growth:g} were allowed"
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
        milliseconds = [
            f"p50 {1000 * pair[0]:.0f} ms, p99 {1000 * pair[1]:.0f} ms"
            for pair in (self.first_token, self.between_tokens)
        ]
        counted = ", ".join(f"{name} {value:.0f}" for name, value in self.counters.items())
        listed = [f"  {what}" for what in (self.errors[:SHOWN] + self.differences[:SHOWN])]
        return [
            f"requests       {self.sent} in {self.seconds:.0f} s, {self.offered_rate:.1f} a second "
            "arriving",
            f"answered       {self.answered}, each compared with plain vLLM's answer",
            f"differences    {len(self.differences)}",
            f"not answered   {len(self.errors)}",
            *listed,
            f"aborted        {self.aborted}",
            f"preemptions    {self.preemptions}",
            f"first token    {milliseconds[0]}",
            f"between tokens {milliseconds[1]}",
            f"speculation    {counted}",
            f"memory         {_shown(self.looks)} MiB",
            f"  plain vLLM's {_shown(self.plain_looks)} MiB",
            f"free KV blocks {self.free_blocks[0]} at the start, {self.free_blocks[1]} at the end",
        ]


def _shown(looks: Sequence[Look]) -> str:
    return " → ".join(f"{look.total_mib:.0f}" for look in looks)


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile; zeros where there is no value."""
    if not values:
        return 0.0, 0.0
    return float(np.percentile(values, 50)), float(np.percentile(values, 99))


def first_tokens(outcomes: Sequence[Outcome | None]) -> list[float]:
    """Seconds of the streams that got a token."""
    return [o.first for o in outcomes if o is not None and o.first is not None]


def gaps(outcomes: Sequence[Outcome | None]) -> list[float]:
    """Seconds between tokens, of all streams."""
    return [gap for o in outcomes if o is not None for gap in o.gaps]


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
