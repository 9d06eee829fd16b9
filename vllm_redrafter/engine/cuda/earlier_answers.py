# SPDX-License-Identifier: Apache-2.0
"""The newest answers of finished requests, kept on the device for the drafts of others."""

import secrets
from collections.abc import Iterable

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.states import RequestState

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.earlier_answers import Partitions
from vllm_redrafter.engine.request_options import partition_of
from vllm_redrafter.tree.earlier_answers import num_places
from vllm_redrafter.triton_kernels.earlier_answers import AnswerStore, enter_answers


class EarlierAnswers:
    """Says whose answers a request may see, and enters its own when it finishes, in `store`, which
    drafts search: CUDA graphs hold its addresses."""

    def __init__(self, config: ReDrafterConfig, states: RequestState) -> None:
        self._states, self._with_prompts = states, config.earlier_prompts
        self._partitions = Partitions(config.earlier_answers)
        # Of requests that have begun and not finished, and of those that began before a reset.
        self._begun, self._forgotten = set[str](), set[str]()
        self._origins = StagedWriteTensor((states.max_num_reqs, 2), torch.int32, states.device)
        texts = states.all_token_ids.gpu, states.total_len.gpu, self._origins.gpu
        sizes = config.earlier_answers, num_places(config.earlier_answers)
        # Texts that were made to share a hash would make all drafts slow.
        self.store = AnswerStore.empty(texts, sizes, seed=secrets.randbits(32))
        enter_answers(self._origins.gpu[:0, 0], self.store)  # compiled before a request finishes

    def begin(self, requests: Iterable[NewRequestData]) -> None:
        """Requests that have got a slot."""
        for new in requests:
            self._begun.add(new.req_id)
            params = new.sampling_params
            key = partition_of(params and params.extra_args, new.lora_request)
            partition = -1 if key is None else self._partitions.id_of(key)
            is_entered = self._with_prompts and new.prompt_embeds is None
            begin = 0 if is_entered else new.prompt_len
            slot = self._states.req_id_to_index[new.req_id]
            self._origins.stage_write(slot, 0, [partition, begin])
        self._origins.apply_write()

    def finish(self, names: Iterable[str]) -> None:
        """Requests that finish, and still have their slots unless they were preempted."""
        self._begun.difference_update(names)
        slots = self._states.req_id_to_index
        # A set of names has another order on another rank, and all must draft the same.
        names = sorted(name for name in names if name in slots and name not in self._forgotten)
        if names:
            at = [slots[name] for name in names]
            enter_answers(async_tensor_h2d(at, self._states.device, torch.int32), self.store)

    def clear(self) -> None:
        """Forget all answers, and those of requests that began before: some may have finished."""
        self.store.clear()
        self._forgotten = {*self._begun}
