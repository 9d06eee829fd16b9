# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers, which count as drafted what was verified.

They count what they schedule, K tokens for each request and step. What was trimmed or not drafted
is told them as what a grammar has ruled out is: `num_invalid_spec_tokens`. And workers are told how
many steps are unread, so that pipeline stages know which blocks can be found by their hash.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_redrafter.engine.cuda.pipeline import UNREAD_STEPS
from vllm_redrafter.engine.cuda.verified_output import VerifiedOutput


class TreeScheduler(Scheduler):
    """Without asynchronous scheduling."""

    _unread = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM does; with the number of earlier steps whose outputs have not been read."""
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        vars(output)[UNREAD_STEPS] = self._unread
        self._unread += 1
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        """As vLLM does, with what was not verified among what is invalid."""
        self._unread -= 1
        if isinstance(model_runner_output, VerifiedOutput):
            # Both cut a tree's end off, so that the shorter rest is left.
            invalid = dict(scheduler_output.num_invalid_spec_tokens or {})
            for request, unverified in model_runner_output.unverified.items():
                invalid[request] = max(unverified, invalid.get(request, 0))
            scheduler_output.num_invalid_spec_tokens = invalid
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        """As vLLM does; no draft where nothing of it was verified."""
        if num_invalid_spec_tokens and num_invalid_spec_tokens.get(request_id) == num_draft_tokens:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )


class AsyncTreeScheduler(TreeScheduler, AsyncScheduler):
    """With it."""
