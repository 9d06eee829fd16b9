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
from vllm_redrafter.engine.request_options import partition_of
from vllm_redrafter.tree.earlier_answers import Partitions, num_places
from vllm_redrafter.triton_kernels.earlier_answers import AnswerStore, enter_answers


class EarlierAnswers:
    """Says whose answers a request may see, and enters its own when it finishes, in `store`, which
    drafts search: CUDA graphs hold its addresses."""

    def __init__(
        self, config: ReDrafterConfig, states: RequestState, of_requests: StagedWriteTensor
    ) -> None:
        self._states, self._with_prompts = states, config.earlier_prompts
        self._partitions = Partitions(config.earlier_answers)
        self._of_requests = of_requests
        texts = states.all_token_ids.gpu, states.total_len.gpu, of_requests.gpu[2:]
        sizes = config.earlier_answers, num_places(config.earlier_answers)
        # Texts that were made to share a hash would make all drafts slow.
        self.store = AnswerStore.empty(texts, sizes, seed=secrets.randbits(32))
        enter_answers(texts[1][:0], self.store)  # compiled before a request finishes

    def begin(self, slot: int, new: NewRequestData) -> None:
        """A request that has got a slot; what is staged of it is written with the table's."""
        params = new.sampling_params
        key = partition_of(params and params.extra_args, new.lora_request)
        partition = self._partitions.begin(new.req_id, key)
        is_entered = self._with_prompts and new.prompt_embeds is None
        for row, value in enumerate((partition, 0 if is_entered else new.prompt_len), start=2):
            self._of_requests.stage_write(row, slot, [value])

    def finish(self, names: Iterable[str]) -> None:
        """Requests that finish, and still have their slots unless they were preempted."""
        slots = self._states.req_id_to_index
        if at := [slots[name] for name, _ in self._partitions.finish(names) if name in slots]:
            enter_answers(async_tensor_h2d(at, self._states.device, torch.int32), self.store)

    def clear(self) -> None:
        """See `Partitions.reset`."""
        self.store.clear()
        self._partitions.reset()
