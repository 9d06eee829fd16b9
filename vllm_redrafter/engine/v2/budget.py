"""vLLM's adaptive verification for trees, and the question that it does not ask: draft at all?

`AdaptiveVerificationManager` chooses how many draft tokens the whole batch verifies, from costs
that it measures at start-up and from the confidences of a step ago, and admits each request's
first ones on the device. A tree's nodes come in the order of their survival probability, so a
request's first nodes are again a tree. Added here: where no budget is worth the draft, the next
steps neither draft nor verify (`vllm_redrafter/budget/gate.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_redrafter.budget.choice import Choice, best_budget
from vllm_redrafter.budget.gate import Gate, worth_drafting
from vllm_redrafter.engine.v2.stats import StepMeter

MEMORY = 16.0
"""Steps that what is expected of a new request reaches back."""


class TreeBudget(AdaptiveVerificationManager):
    """The batch's budget, decided on the host from values of a step ago: nothing waits.

    vLLM expects of a new request that all is accepted. That would draft for all requests whenever
    one comes, so here it is expected to be as the others are.
    """

    _batch_budget: tuple[dict[str, int], dict[str, int], int] | None

    def __init__(self, *args: Any, meter: StepMeter, **kwargs: Any) -> None:
        """As vLLM makes it; what is decided is counted in `meter`."""
        super().__init__(*args, **kwargs)
        self.gate, self.meter = Gate(), meter
        # Compiled now, and not while the first requests wait.
        best_budget(np.ones((1, 1)), 1, draft_seconds=1.0, verify_seconds=np.ones(3))
        self._pays, self._probing = True, False
        # Are there drafts of the last step; and has the host read the confidences of the last ones?
        self._drafted, self._up_to_date = True, False
        self._usual = np.ones(self.num_speculative_steps, dtype=np.float32)

    def drafts_now(self, possible: bool) -> bool:
        """Shall the step that is running end with a draft? To be asked once in each.

        Args:
            possible: vLLM has room for draft tokens in the next one.
        """
        self._drafted = possible and self.gate.opens(self._pays)
        self._probing = self._drafted and not self._pays
        if possible and not self._drafted:
            self.meter.count_undrafted()
        return self._drafted

    def add_request(self, req_idx: int) -> None:
        super().add_request(req_idx)
        self._stale_confidences[self._stale_idx].np[req_idx] = self._usual
        async_tensor_h2d(self._usual, out=self._confidence_probs[req_idx])

    def record_confidences(self, confidence_probs: Tensor, input_batch: InputBatch) -> None:
        """As vLLM does, in steps that drafted.

        After the last of these once more: a copy to the host is read a record later.
        """
        if not self._drafted:
            if self._up_to_date:
                return
            confidence_probs = self._confidence_probs[input_batch.idx_mapping]
        self._up_to_date = not self._drafted
        new = self._pending_resets.copy()
        super().record_confidences(confidence_probs, input_batch)
        self._stale_confidences[self._stale_idx].np[new] = self._usual

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Rows of the step's batch, trimmed; none of drafts where the last step made none."""
        num_tokens = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        assert self._batch_budget is not None
        drafts, others, budget = self._batch_budget
        best = self._consider(drafts, others)
        chosen = budget
        if not self._drafted:
            chosen = 0
        elif self._probing:
            # A probe that verified nothing would find out nothing.
            room = self._max_total_logits - len(drafts) * self.num_bonus_tokens
            chosen = max(budget, min(np.count_nonzero([*drafts.values()]), room))
        if chosen:
            self.meter.expect(best.tokens)
        self._batch_budget = drafts, others, chosen
        return num_tokens - budget + chosen

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
        survival[np.arange(survival.shape[1]) >= lengths[:, None]] = 0
        sampling, plain = self._sampling(slots, rows), int(rows.sum())
        best = best_budget(
            survival, sampling, draft_costs[len(drafts)], verify_costs[plain - sampling :]
        )
        plain_rate = sampling / verify_costs[plain]
        self._pays = worth_drafting(best.tokens_per_second, plain_rate, self._pays)
        return best

    def _sampling(self, slots: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> int:
        """How many requests output a token: not those whose prompt is not read to its end."""
        states = self.req_states
        read = states.num_computed_tokens_np[slots] + rows
        return int(np.count_nonzero(read >= states.prefill_len.np[slots]))
