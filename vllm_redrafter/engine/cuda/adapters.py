# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in steps that verify: each row of logits has that of its request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState


class VerifiedAdapters(LoraState):
    """vLLM's table of the requests' adapters, which takes a request to have one row of logits.

    The output layer's adapter is found by that row.

    Attributes:
        logits: [R], how many rows of logits each request of the step has, prompt chunks 1; to be
            set before `make_lora_inputs`.
    """

    logits: npt.NDArray[np.int32]

    def make_lora_inputs(
        self,
        req_ids: list[str],
        idx_mapping: npt.NDArray[np.int32],
        num_scheduled_tokens: npt.NDArray[np.int32],
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        """As vLLM does, but for the first part.

        Returns:
            (the adapter of each row of logits, that of each row of the step, the adapters in use).
        """
        _, of_rows, in_use = super().make_lora_inputs(req_ids, idx_mapping, num_scheduled_tokens)
        return tuple(self.lora_ids[idx_mapping].repeat(self.logits)), of_rows, in_use
