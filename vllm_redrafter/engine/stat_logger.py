# SPDX-License-Identifier: Apache-2.0
"""What the batch's budget decided, in vLLM's periodic log and under /metrics.

`plugin.py` adds it where a ReDrafter speculates: as an entry point (`vllm.stat_logger_plugins`),
its presence would override --disable-log-stats in every server.
"""

import functools
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_redrafter.engine.log import logger
from vllm_redrafter.engine.published import Counters, subscribe

# In the order of Counters. vLLM deletes other loggers' metrics where they begin with "vllm:".
METRICS = """
redrafter:steps Engine steps that verified at least one draft.
redrafter:verifications Drafts verified, one per request and step.
redrafter:drafted_nodes Tree nodes verified, roots not counted.
redrafter:sampled_tokens Tokens that the verifications put out.
redrafter:expected_tokens Tokens that they were expected to put out; 0 without a budget.
redrafter:undrafted_steps Engine steps after which nothing was drafted.
redrafter:matched_nodes Tree nodes verified that continue the request's own text as before.
redrafter:accepted_matched_nodes Those of them that were accepted.
redrafter:earlier_nodes Tree nodes verified that continue as an earlier answer did.
redrafter:accepted_earlier_nodes Those of them that were accepted.
redrafter:decoding_seconds Steps without prompts, where plain ones of as many requests were timed.
redrafter:plain_seconds What plain steps would have taken for the same tokens: an estimate.
""".strip().splitlines()


class ReDrafterStatLogger(StatLoggerBase):
    """Reads what one data-parallel engine's worker publishes."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._engine = engine_index
        self._model = vllm_config.model_config.served_model_name
        self._read: Callable[[], Counters] | None = None
        self._metrics: list[Counter] = []
        self._counted = self._logged = Counters()

    def log_engine_initialized(self) -> None:
        """Find the worker's counters, which are there when the engine is ready."""
        try:
            self._read = subscribe(self._engine)
        except FileNotFoundError:
            logger.warning(
                "Engine %03d: no ReDrafter counters under /metrics and in the log: its worker is "
                "on another machine, or did not inherit this server's environment",
                self._engine,
            )
            return
        labels = self._model, str(self._engine)
        self._metrics = [metric.labels(*labels) for metric in _metrics()]

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Bring /metrics up to date; vLLM calls it when an engine's outputs arrive."""
        if self._read is None:
            return
        counters = self._read()
        for metric, increase in zip(self._metrics, counters.since(self._counted), strict=True):
            metric.inc(increase)
        self._counted = counters

    def log(self) -> None:
        self.record()
        interval = self._counted.since(self._logged)
        if interval.steps or interval.undrafted_steps:
            logger.info("Engine %03d: ReDrafter: %s", self._engine, _described(interval))
        self._logged = self._counted


def _described(counters: Counters) -> str:
    undrafted = counters.undrafted_steps / (counters.steps + counters.undrafted_steps)
    parts = [f"{100 * undrafted:.1f} % of steps not drafted"]
    if verifications := counters.verifications:
        parts += [
            f"{counters.drafted_tokens / verifications:.2f} nodes per verification",
            f"{counters.sampled_tokens / verifications:.2f} tokens",
        ]
        if counters.expected_tokens:
            parts.append(f"{counters.expected_tokens / verifications:.2f} expected")
    for matched, accepted, where in (
        (counters.matched_tokens, counters.accepted_matched_tokens, "the text"),
        (counters.earlier_tokens, counters.accepted_earlier_tokens, "earlier answers"),
    ):
        if matched:
            share = 100 * accepted / matched
            parts.append(f"{share:.0f} % of {matched:.0f} nodes found in {where} accepted")
    if seconds := counters.decoding_seconds:
        parts.append(f"{counters.plain_seconds / seconds:.2f} times plain's speed (estimated)")
    return ", ".join(parts)


@functools.cache
def _metrics() -> list[Counter]:
    """In the order of Counters; once per process, as a name cannot be registered twice."""
    named = (metric.split(" ", 1) for metric in METRICS)
    return [Counter(name, text, ["model_name", "engine"]) for name, text in named]
