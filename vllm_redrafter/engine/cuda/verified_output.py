# SPDX-License-Identifier: Apache-2.0
"""A step's output, and how much of what vLLM scheduled it verified.

vLLM schedules K draft tokens for each request before it is known how many there are; trees are
trimmed on the device, and some steps draft nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch


@dataclass
class VerifiedOutput(ModelRunnerOutput):
    """What a worker tells the scheduler.

    Attributes:
        unverified: by request, how many of its scheduled draft tokens were not verified; none of
            those of which all were.
    """

    unverified: dict[str, int] = field(default_factory=dict)


class PendingOutput(AsyncModelRunnerOutput):
    """The same, while the device is still at work."""

    def __init__(
        self, output: AsyncModelRunnerOutput, input_batch: InputBatch, num_nodes: Tensor | None
    ) -> None:
        """Wait for nothing yet.

        Args:
            output: vLLM's.
            input_batch: of the step, in which draft tokens were scheduled.
            num_nodes: [R] int32, of the verified trees, roots included: a copy on the host that was
                begun before vLLM's own. None where nothing was verified.
        """
        self._output, self._num_nodes = output, num_nodes
        self._requests = input_batch.req_ids
        self._scheduled = input_batch.num_draft_tokens_per_req

    def get_output(self) -> VerifiedOutput:
        """Wait for vLLM's copies to the host, and thereby for ours."""
        output = self._output.get_output()
        verified = 0 if self._num_nodes is None else self._num_nodes.numpy() - 1
        missing = zip(self._requests, (self._scheduled - verified).tolist(), strict=True)
        return VerifiedOutput(**vars(output), unverified={r: n for r, n in missing if n > 0})

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """What the step's KV connector reports; vLLM 0.33 asks where `get_output` fails."""
        return self._output.get_kv_connector_output()
