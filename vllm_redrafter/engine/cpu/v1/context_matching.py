# SPDX-License-Identifier: Apache-2.0
"""Prompt-lookup (n-gram) matches of the CPU engine's requests: in own text and earlier answers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.earlier_answers import AnswerStore
from vllm_redrafter.drafting.own_matches import own_matches
from vllm_redrafter.engine.request_options import partition_of
from vllm_redrafter.tree.context_matches import ContextMatches
from vllm_redrafter.tree.earlier_answers import Partitions


class ContextMatching:
    """Finds the matches of an engine's requests, and keeps the newest answers of finished ones."""

    def __init__(self, config: ReDrafterConfig, vocab_size: int) -> None:
        self._paths = config.context_matches, config.path_length
        self._vocab_size, self._with_prompts = vocab_size, config.earlier_prompts
        self._answers: AnswerStore | None = None
        if config.earlier_answers:
            self._answers = AnswerStore(config.earlier_answers, vocab_size)
        self._partitions = Partitions(config.earlier_answers)

    def update(
        self, scheduled: SchedulerOutput, requests: Mapping[str, CachedRequestState]
    ) -> None:
        """Enter the answers of finished `requests`, before they are forgotten; meet new ones."""
        if self._answers is None:
            return
        for name, partition in self._partitions.finish(scheduled.finished_req_ids):
            if (request := requests.get(name)) is not None:
                self._answers.enter(self._answer(request), partition)
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params
            key = partition_of(params and params.extra_args, new.lora_request)
            self._partitions.begin(new.req_id, key)

    def _answer(self, request: CachedRequestState) -> npt.NDArray[np.int32]:
        tokens = request.output_token_ids
        # Of a prompt given as embeddings there are no tokens.
        if self._with_prompts and request.prompt_embeds is None:
            tokens = [*(request.prompt_token_ids or ()), *tokens]
        return np.array(tokens, dtype=np.int32)

    def forget_answers(self) -> None:
        """See `Partitions.reset`."""
        if self._answers is not None:
            self._answers.clear()
            self._partitions.reset()

    def matches(
        self,
        batch: InputBatch,
        active: Sequence[int],
        names: Sequence[str],
        sampled: npt.NDArray[np.bool_],
        probabilities: npt.NDArray[np.float32],
    ) -> ContextMatches:
        """The paths of R requests.

        Args:
            active, names: their places in the batch, and what they are called.
            sampled: [R], requests that sample.
            probabilities: see `MatchAcceptance`.
        """
        rows = np.asarray(active)
        # Of the types that `warm_up` compiled for.
        num_tokens = batch.num_tokens_no_spec[rows].astype(np.int64)
        texts: Any = batch.token_ids_cpu
        if batch.req_prompt_embeds:
            # Where vLLM has an embedding, it leaves the token of an earlier request in the row.
            known = rows, slice(num_tokens.max())
            texts = np.where(batch.is_token_ids[known], texts[known], self._vocab_size)
            rows = np.arange(len(rows))
        own = own_matches(texts, rows, num_tokens, self._paths, self._vocab_size)
        if self._answers is None:
            return own
        partitions = np.fromiter(map(self._partitions.of.__getitem__, names), np.int64)
        of_texts = texts, rows, num_tokens
        return self._answers.with_earlier(own, of_texts, partitions, sampled, probabilities)
