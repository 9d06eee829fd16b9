"""vLLM's adaptive verification for trees, and what it does not ask: draft at all, and how far?

`AdaptiveVerificationManager` chooses how many draft tokens the whole batch verifies, from costs
that it measures at start-up and from the confidences of a step ago, and admits each request's
first ones on the device. A tree's nodes come in the order of their survival probability, so a
request's first nodes are again a tree. Added here: where no budget is worth the draft, the next
steps neither draft nor verify (`vllm_redrafter/budget/gate.py`), and where the last levels of a
draft are not worth their time, it has fewer (`vllm_redrafter/budget/draft_lengths.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_redrafter.budget.choice import Choice, best_budget
from vllm_redrafter.budget.draft_lengths import LengthChoice
from vllm_redrafter.budget.gate import Gate, worth_drafting
from vllm_redrafter.engine.cuda.stale_depths import StaleDepths
from vllm_redrafter.engine.cuda.stats import StepTimer

MEMORY = 16.0
"""Steps that what is expected of a new request reaches back."""
PROFILE_REPLAYS = 3
"""Times that a draft of a batch size and a length is timed at start-up, where it is not of full
length: those vLLM times as it does steps."""


class TreeBudget(AdaptiveVerificationManager):
    """The batch's budget, decided on the host from values of a step ago: nothing waits.

    vLLM expects of a new request that all is accepted. That would draft for all requests whenever
    one comes, so here it is expected to be as the others are.
    """

    _batch_budget: tuple[dict[str, int], dict[str, int], int] | None
    cost_tables: tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.floating[Any]]] | None

    def __init__(
        self,
        *args: Any,
        meter: StepTimer,
        lengths: Sequence[int],
        depths: Tensor,
        **kwargs: Any,
    ) -> None:
        """As vLLM makes it.

        Args:
            meter: counts what is decided.
            lengths: how many levels a draft may have, ascending.
            depths: [slots, K] int32 on the device, of the nodes drafted last.
        """
        super().__init__(*args, **kwargs)
        self.gate, self.meter = Gate(), meter
        self.lengths = LengthChoice(lengths, self.num_speculative_steps)
        self._depths = StaleDepths(depths, self._copy_stream)
        # Of the draft that is made now, and of those whose confidences are read and copied.
        self._length = self._copied = self.lengths.longest
        self._read = 0
        self._profiled: list[int] = []
        self._draft_costs: list[npt.NDArray[np.floating[Any]]] = []
        # Compiled now, and not while the first requests wait.
        best_budget(np.ones((1, 1)), 1, draft_seconds=1.0, verify_seconds=np.ones(3))
        self._pays, self._probing = True, False
        # Tokens per second expected of drafting, over plain decoding's.
        self._gain = 1.0
        # Are there drafts of the last step; and has the host read the confidences of the last ones?
        self._drafted, self._up_to_date = True, False
        self._usual = np.ones(self.num_speculative_steps, dtype=np.float32)
        # By slot: did its request's last step draft?
        self._has_tree = np.zeros(self.req_states.max_num_reqs, dtype=np.bool_)

    def drafts_now(self, possible: bool) -> bool:
        """Shall the step that is running end with a draft? To be asked once in each.

        Args:
            possible: vLLM has room for draft tokens in the next one.
        """
        self._drafted = possible and self.gate.opens(self._pays, gain=self._gain)
        self._probing = self._drafted and not self._pays
        if possible and not self._drafted:
            self.meter.count_undrafted()
        return self._drafted

    def next_length(self, most: int) -> int:
        """How many levels the draft that begins searches; to be asked once for each.

        Args:
            most: no node of a deeper one would be verified.
        """
        self._length = min(self.lengths.next(), most)
        return self._length

    @property
    def warm_up_length(self) -> int:
        """How many levels the draft of a dummy run searches."""
        return self._profiled[-1] if self._profiled else self.lengths.longest

    @property
    def is_profiling(self) -> bool:
        """Are dummy runs timed?"""
        return bool(self._profiled)

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """vLLM's, with drafts of full length; and shorter ones of each number of requests.

        Tokens are drawn at random: of a mixture of experts, equal ones would need the same few.
        """
        size = 0
        for batch in super().batches_to_profile(capture_sizes):
            is_new = size < min(batch["num_tokens"], self.req_states.max_num_reqs)
            size = batch["num_tokens"]
            shorter = self.lengths.lengths[:-1] if is_new else ()
            for length in (self.lengths.longest, *shorter * PROFILE_REPLAYS):
                self._profiled.append(length)
                yield batch | {"randomize_inputs": True}

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """As vLLM does for the longest drafts; and the same for the others."""
        profiled, self._profiled = self._profiled, []
        self._draft_costs = []
        for length in self.lengths.lengths:
            # vLLM takes drafts' costs from full graphs alone, steps' from all samples.
            super().set_initial_cost_curves(
                [
                    sample if taken == length else replace(sample, full_cudagraph=False)
                    for sample, taken in zip(samples, profiled, strict=True)
                ]
            )
            assert self.cost_tables is not None
            self._draft_costs.append(self.cost_tables[0])
        self._warm_up_trims()

    def _warm_up_trims(self) -> None:
        """Trim batches as steps do. torch compiles vLLM's choice of nodes where it is first needed,
        while all requests wait, and anew for a single request and for a single node."""
        most, nodes = self.req_states.max_num_reqs, int(self.num_speculative_steps)
        # No other size of these tensors: torch takes sizes that are equal once to be always equal.
        several = next((size for size in range(2, most) if size != nodes), most)
        for requests, budget in product({1, several}, (1, 2)):
            if budget < requests * nodes:
                ids = [str(request) for request in range(requests)]
                self._batch_budget = dict.fromkeys(ids, nodes), dict.fromkeys(ids, 1), budget
                rows = torch.arange(requests, dtype=torch.int32, device=self.req_states.device)
                self.reallocate_drafts(ids, rows)

    def add_request(self, req_idx: int) -> None:
        super().add_request(req_idx)
        self._stale_confidences[self._stale_idx].np[req_idx] = self._usual
        async_tensor_h2d(self._usual, out=self._confidence_probs[req_idx])
        self._has_tree[req_idx] = False

    def record_confidences(self, confidence_probs: Tensor, input_batch: InputBatch) -> None:
        """As vLLM does, in steps that drafted.

        After the last of these once more: a copy to the host is read a record later.
        """
        self._has_tree[input_batch.idx_mapping_np] = self._drafted
        if not self._drafted:
            if self._up_to_date:
                return
            confidence_probs = self._confidence_probs[input_batch.idx_mapping]
        self._up_to_date = not self._drafted
        new = self._pending_resets.copy()
        super().record_confidences(confidence_probs, input_batch)
        self._stale_confidences[self._stale_idx].np[new] = self._usual
        if len(self.lengths.lengths) > 1:
            self._depths.record(self._copy_events[self._stale_idx ^ 1], new)
            self._read, self._copied = self._copied, self._length if self._drafted else 0

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Rows of the step's batch, trimmed; none of drafts where the last step made none."""
        padding = self._padding(draft_tokens) if self._drafted else {}
        if padding:
            draft_tokens = {r: drafts for r, drafts in draft_tokens.items() if r not in padding}
            num_tokens_per_req = {
                r: rows - padding.get(r, 0) for r, rows in num_tokens_per_req.items()
            }
        num_tokens = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        assert self._batch_budget is not None
        drafts, others, budget = self._batch_budget
        # Whether to draft is another question: the next drafts will be of all requests.
        best = self._consider({**drafts, **padding}, others)
        chosen = budget
        if not self._drafted:
            chosen = 0
        elif self._probing:
            # A probe that verified nothing would find out nothing.
            room = self._max_total_logits - len(drafts) * self.num_bonus_tokens
            # A number of Python's: of numpy's, torch compiles vLLM's choice anew.
            chosen = max(budget, min(int(np.count_nonzero([*drafts.values()])), room))
        if chosen:
            self.meter.expect(best.tokens)
        self._batch_budget = drafts, others, chosen
        return num_tokens - budget + chosen

    def _padding(self, draft_tokens: Mapping[str, list[int]]) -> dict[str, int]:
        """How many draft tokens are scheduled of requests that have no tree.

        vLLM pads a request to a verification where its prompt is cached but for a token, so that
        the step's sizes are equal; and it schedules K for whoever ran in a step that did not draft.
        """
        slots = np.fromiter(
            map(self.req_states.req_id_to_index.__getitem__, draft_tokens), np.int64
        )
        has_tree = self._has_tree[slots]
        if has_tree.all():
            return {}
        scheduled = zip(draft_tokens.items(), has_tree, strict=True)
        return {request: len(drafts) for (request, drafts), has in scheduled if not has}

    def _consider(self, drafts: Mapping[str, int], others: Mapping[str, int]) -> Choice:
        """Find the best budget, and whether it is faster than plain decoding, the draft included.

        Args:
            drafts: how many draft tokens each request has in the step.
            others: how many other tokens.
        """
        assert self.cost_tables is not None
        draft_costs, verify_costs = self.cost_tables
        slots = np.fromiter(map(self.req_states.req_id_to_index.__getitem__, drafts), np.int64)
        lengths = np.fromiter(drafts.values(), np.int64)
        rows = np.fromiter(others.values(), np.int64)
        confidences = self._stale_confidences[self._stale_idx].np[slots]
        if lengths.any():
            self._usual += (confidences[lengths > 0].mean(axis=0) - self._usual) / MEMORY
        survival = np.cumprod(confidences, axis=1, dtype=np.float64)
        sampling, plain = self._sampling(slots, rows), int(rows.sum())
        survival[np.arange(survival.shape[1]) >= lengths[:, None]] = 0
        self._consider_lengths(survival, slots, plain)
        best = best_budget(
            survival, sampling, draft_costs[len(drafts)], verify_costs[plain - sampling :]
        )
        plain_rate = sampling / verify_costs[plain]
        self._gain = float(best.tokens_per_second / plain_rate)
        self._pays = worth_drafting(self._gain, self._pays)
        return best

    def _consider_lengths(
        self, survival: npt.NDArray[np.float64], slots: npt.NDArray[np.int64], plain: int
    ) -> None:
        """Choose how long the next drafts are; by what was read now, if that is a survey.

        Args:
            survival: [R, K]; what the usual drafts would not have found is taken out.
            slots: [R], whose it is.
            plain: rows of the step without drafts.
        """
        if not self._draft_costs:
            return
        assert self.cost_tables is not None
        verify, requests, lengths = self.cost_tables[1], len(slots), self.lengths
        costs = np.array([of_length[requests] for of_length in self._draft_costs])
        surveyed, self._read = self._read == lengths.longest, 0  # Only once.
        if surveyed:
            depths = self._depths.read(slots)
            drafted = (depths[:, 0] > 0) & (survival[:, 0] > 0)
            lengths.learn(survival[drafted], depths[drafted])
        lengths.consider(requests, plain, costs, verify)
        if surveyed:
            survival[depths > lengths.best] = 0
        self.cost_tables = self._draft_costs[lengths.lengths.index(lengths.best)], verify

    def _sampling(self, slots: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> int:
        """How many requests output a token: not those whose prompt is not read to its end."""
        states = self.req_states
        read = states.num_computed_tokens_np[slots] + rows
        return int(np.count_nonzero(read >= states.prefill_len.np[slots]))
