# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampler, in one pass over the logits where a batch needs temperatures alone.

vLLM copies such logits to float32 and divides the copy, before its kernel draws from it. The kernel
can divide what it reads, to the same tokens: of 16-bit logits it reads 2 bytes a number, not 18.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates


class OnePassSampler(Sampler):
    """In place of the `sampler` that vLLM has made; it returns no log-probabilities of divided
    logits."""

    def __init__(self, sampler: Sampler) -> None:
        self.__dict__.update(vars(sampler))
        self.sampling_states = _SamplingStates(sampler)

    def sample(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The token of each row of logits, [rows] int64, and the logits that it was drawn from."""
        expanded_idx_mapping, _, idx_mapping_np, pos, *_ = args
        if self.needs_logits_processing[idx_mapping_np].any():
            return super().sample(logits, *args, **kwargs)
        sampled = gumbel_sample(
            logits,
            expanded_idx_mapping,
            self.sampling_states.temperature.gpu,
            self.sampling_states.seeds.gpu,
            pos,
            apply_temperature=True,
            is_drafting=False,
            use_fp64=self.use_fp64_gumbel,
        )
        return sampled, logits


class _SamplingStates(SamplingStates):
    """vLLM's; what every program of the kernel reads is on the device, not in the host's memory."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler.sampling_states.max_num_reqs, sampler.sampling_states.vocab_size)
        on_device = torch.zeros_like(self.seeds.cpu, device=sampler.req_states.device)
        self._copies = {self.seeds: on_device, self.temperature: on_device.float()}
        self._changed = True

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Whether the request needs more than a temperature."""
        self._changed = True
        if not super().add_request(req_idx, sampling_params):
            return False
        limits = self.min_p.np[req_idx], self.top_p.np[req_idx], self.top_k.np[req_idx]
        return limits != (0.0, 1.0, self.vocab_size)

    def apply_staged_writes(self) -> None:
        """For the step's new requests, if it has any."""
        if self._changed:
            super().apply_staged_writes()
            for state, copy in self._copies.items():
                state.gpu = copy.copy_(state.gpu, non_blocking=True)
        self._changed = False
