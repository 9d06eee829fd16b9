# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers, which count as drafted what was verified.

vLLM schedules K tokens per request and step. What was trimmed or not drafted is reported as
`num_invalid_spec_tokens`, as tokens that a grammar rules out. After steps planned without drafts
none are scheduled, until one is planned with a draft again. Workers get the number of unread steps,
so that pipeline stages know which blocks can be found by their hash.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_redrafter.engine.v2.budget import TreeBudget
from vllm_redrafter.engine.v2.pipeline import UNREAD_STEPS


@dataclass
class _VerifiedOutput(ModelRunnerOutput):
    """A worker's output: `unverified` of the scheduled draft tokens by request, if there are any;
    and whether the step was planned with a draft."""

    unverified: dict[str, int] = field(default_factory=dict)
    drafts: bool = True


class PendingOutput(AsyncModelRunnerOutput):
    """The same, while the device is at work; `num_nodes` [R] is a copy begun before vLLM's.

    `budget` learns how many nodes were accepted, where nodes were verified.
    """

    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        input_batch: InputBatch,
        num_nodes: Tensor | None,
        budget: TreeBudget | None = None,
    ) -> None:
        self._output, self._num_nodes, self._budget = output, num_nodes, budget
        self._drafts = budget is None or budget.drafts
        if budget is not None:
            self._expected = budget.expected
            self._kinds = budget.samples[input_batch.idx_mapping_np]
        self._requests = input_batch.req_ids
        self._scheduled = input_batch.num_draft_tokens_per_req

    def get_output(self) -> _VerifiedOutput:
        """Wait for vLLM's copies to the host, and thereby for ours."""
        output = self._output.get_output()
        verified = 0 if self._num_nodes is None else self._num_nodes.numpy() - 1
        if self._budget is not None and self._num_nodes is not None:
            sampled = np.fromiter(map(len, output.sampled_token_ids), np.int64)
            accepted = np.bincount(self._kinds, (sampled - 1) * (verified > 0), 2)
            self._budget.judged.append((self._expected, accepted))
        unverified = {}
        if self._scheduled is not None:
            missing = zip(self._requests, (self._scheduled - verified).tolist(), strict=True)
            unverified = {request: n for request, n in missing if n > 0}
        return _VerifiedOutput(**vars(output), unverified=unverified, drafts=self._drafts)

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """vLLM 0.33 asks for it where `get_output` fails."""
        return self._output.get_kv_connector_output()


class TreeScheduler(Scheduler):
    """vLLM's scheduler without asynchronous scheduling."""

    _unread = 0
    _drafts = True

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM does, with the number of earlier steps with unread outputs."""
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        vars(output)[UNREAD_STEPS] = self._unread
        self._unread += 1
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        """As vLLM does, with unverified tokens counted as invalid."""
        self._unread -= 1
        if isinstance(model_runner_output, _VerifiedOutput):
            self._drafts = model_runner_output.drafts
            # Both cut a tree's end off, so that the shorter rest is left.
            invalid = dict(scheduler_output.num_invalid_spec_tokens or {})
            for request, unverified in model_runner_output.unverified.items():
                invalid[request] = max(unverified, invalid.get(request, 0))
            scheduler_output.num_invalid_spec_tokens = invalid
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self, spec_decoding_stats: Any, *, request_id: str, num_draft_tokens: int, **kwargs: Any
    ) -> Any:
        """As vLLM does; no draft where nothing of it was verified."""
        if (kwargs["num_invalid_spec_tokens"] or {}).get(request_id) == num_draft_tokens:
            return spec_decoding_stats
        kwargs |= {"request_id": request_id, "num_draft_tokens": num_draft_tokens}
        return super().make_spec_decoding_stats(spec_decoding_stats, **kwargs)


class AsyncTreeScheduler(TreeScheduler, AsyncScheduler):
    """vLLM's scheduler with asynchronous scheduling."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """As vLLM does, which takes placeholders for as many draft tokens as the step may draft:
        none while steps are plain, as in vLLM's own schedules of K by batch size.
        """
        most = scheduler_output.num_spec_tokens_to_schedule
        scheduler_output.num_spec_tokens_to_schedule = most if self._drafts else 0
        super()._update_after_schedule(scheduler_output)
        scheduler_output.num_spec_tokens_to_schedule = most
