# SPDX-License-Identifier: Apache-2.0
"""vLLM's adaptive verification for trees, which also decides whether and how far to draft.

`AdaptiveVerificationManager` chooses how many draft tokens the whole batch verifies, from costs
measured at start-up and confidences of a step ago, and admits each request's first ones on the
device. A tree's nodes come in the order of their survival probability, so a request's first nodes
are again a tree. Whether the next steps draft, and with which length, is chosen by
`vllm_redrafter/budget/planner.py`; a draft of length 0 has prompt-lookup matches alone.

Some attention backends, those of recurrent states among them, cannot read batches that were trimmed
on the device: there a step verifies all that was drafted, or nothing.
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
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu.async_utils import StepTimingSample, stream
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_redrafter.budget.acceptance import HORIZON, SurvivalProfile
from vllm_redrafter.budget.choice import Floats, best_common_budget
from vllm_redrafter.budget.costs import bucket
from vllm_redrafter.budget.planner import ArmChoice
from vllm_redrafter.checkpoints.acceptance import AcceptanceRecord
from vllm_redrafter.engine.cuda.stats import StepTimer

MEMORY = 16.0
"""Window, in steps, of the running mean that initialises a new request."""
LEARNED_REQUESTS = 32
"""The most requests of a draft that the host learns from."""
Integers = npt.NDArray[np.int64]
PROFILE_REPLAYS = 3
"""How often a draft shorter than the longest is timed at start-up; vLLM times the longest."""


class TreeBudget(AdaptiveVerificationManager):
    """The batch's budget, decided on the host from values of a step ago: nothing waits.

    vLLM expects that a new request accepts all nodes, and would draft for all requests whenever one
    arrives. Here a new request is expected to accept as the running mean of the others.
    """

    _batch_budget: tuple[dict[str, int], dict[str, int], int] | None
    cost_tables: tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.floating[Any]]] | None

    def __init__(
        self,
        *args: Any,
        meter: StepTimer,
        lengths: Sequence[int],
        depths: Tensor,
        recorded: AcceptanceRecord | None = None,
        paths: tuple[int, int] = (0, 0),
        is_chain: bool = False,
        trims: bool = True,
        **kwargs: Any,
    ) -> None:
        """vLLM's arguments, and:

        Args:
            meter: counts decisions.
            lengths: the draft lengths there are, ascending.
            depths: [slots, K] int32 on the device, of the nodes drafted last.
            recorded: the drafter's measured acceptance.
            paths: M and D of the prompt-lookup matches.
            is_chain: drafts are single paths.
            trims: the target's attention reads trimmed batches.
        """
        super().__init__(*args, **kwargs)
        self.trims = trims
        self.meter, self.lengths = meter, tuple(lengths)
        self.arms = ArmChoice(arms_to_explore(self.lengths))
        self._arm, self._explores = len(self.lengths), False
        self._plain_steps = 0  # In a row.
        longest = self.lengths[-1]
        # Two profiles: searched drafts (matches included), match-only drafts.
        self._ranks = 1 if is_chain else int(self.num_speculative_steps)
        self.profile = SurvivalProfile(longest, self._ranks, recorded)
        num_paths, self._depth = paths
        self._num_paths = min(num_paths, self._ranks)
        self.match_profile = SurvivalProfile(self._depth, self._num_paths)
        self._depths = _StaleDepths(depths, self._copy_stream)
        # Lengths of the current draft, and of those whose confidences are copied and read.
        self._length = longest
        self._copied: int | None = longest
        self._read: int | None = None
        self._profiled: list[int] = []
        self._draft_costs: list[Floats] = []
        # Did the last step draft; has the host read the confidences of the last drafts?
        self._drafted, self._up_to_date = True, False
        self._usual = np.ones(self.num_speculative_steps, dtype=np.float32)
        # By slot: did its request's last step draft?
        self._has_tree = np.zeros(self.req_states.max_num_reqs, dtype=np.bool_)

    def drafts_now(self, possible: bool) -> bool:
        """Shall the running step end with a draft? `possible`: the next step has room for one."""
        self._drafted = possible and self._arm > 0
        return self._drafted

    def next_length(self, limit: int) -> int:
        """How many levels the next draft searches, at most `limit`: no deeper node is verified."""
        self._length = min(self.lengths[self._arm - 1], limit)
        return self._length

    @property
    def warm_up_length(self) -> int:
        """How many levels a dummy run's draft searches."""
        return self._profiled[-1] if self._profiled else self.lengths[-1]

    @property
    def is_profiling(self) -> bool:
        return bool(self._profiled)

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """vLLM's, with drafts of full length; and shorter ones of each number of requests.

        Tokens are random: equal ones would be routed to the same few experts.
        """
        rows = int(self.num_speculative_steps) + 1
        known = set()
        for batch in self._steps_to_profile(capture_sizes):
            # vLLM takes draft costs from full graphs only; without trimming, there may be none.
            has_graph = self.trims or "uniform_decode" in batch
            requests = batch["num_tokens"] if self.trims else batch["num_tokens"] // rows
            requests = min(requests, self.req_states.max_num_reqs)
            shorter = self.lengths[:-1] if has_graph and requests not in known else ()
            if has_graph:
                known.add(requests)
            for length in (self.lengths[-1], *shorter * PROFILE_REPLAYS):
                self._profiled.append(length)
                yield batch | {"randomize_inputs": True}

    def _steps_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """vLLM's; without trimming, only sizes for which there are graphs."""
        most, rows = self.req_states.max_num_reqs, int(self.num_speculative_steps) + 1
        for batch in super().batches_to_profile(capture_sizes):
            requests, remainder = divmod(batch["num_tokens"], rows)
            if self.trims or batch["num_tokens"] <= most or requests > most:
                yield batch
            if not (self.trims or remainder or requests > most):
                yield batch | {"uniform_decode": True}

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """As vLLM does, for each draft length."""
        profiled, self._profiled = self._profiled, []
        self._draft_costs = []
        for length in self.lengths:
            # vLLM takes drafts' costs from full graphs alone, steps' from all samples.
            super().set_initial_cost_curves(
                [
                    sample if taken == length else replace(sample, full_cudagraph=False)
                    for sample, taken in zip(samples, profiled, strict=True)
                ]
            )
            assert self.cost_tables is not None
            self._draft_costs.append(self.cost_tables[0])
        if self.trims:
            self._warm_up_trims()

    def _warm_up_trims(self) -> None:
        """Trim batches as steps do: torch compiles vLLM's choice of nodes at first use, and again
        for a single request and for a single node.
        """
        most, nodes = self.req_states.max_num_reqs, int(self.num_speculative_steps)
        # No other size of these tensors: torch takes sizes that are equal once to be always equal.
        several = next((size for size in range(2, most) if size != nodes), most)
        for requests, budget in product({1, several}, (1, 2)):
            if budget < requests * nodes:
                ids = [str(request) for request in range(requests)]
                self._batch_budget = dict.fromkeys(ids, nodes), dict.fromkeys(ids, 1), budget
                # int64 as steps' own: torch compiles for a dtype.
                rows = torch.arange(requests, dtype=torch.int64, device=self.req_states.device)
                self.reallocate_drafts(ids, rows)

    def add_request(self, req_idx: int) -> None:
        super().add_request(req_idx)
        self._stale_confidences[self._stale_idx].np[req_idx] = self._usual
        async_tensor_h2d(self._usual, out=self._confidence_probs[req_idx])
        self._has_tree[req_idx] = False

    def record_confidences(self, confidence_probs: Tensor, input_batch: InputBatch) -> None:
        """As vLLM does, in steps that drafted; and once more after the last of these: a copy to
        the host is read a record later.
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
        self._depths.record(self._copy_events[self._stale_idx ^ 1], new)
        self._read, self._copied = self._copied, self._length if self._drafted else None

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Rows of the step's batch, trimmed; no draft rows where the last step made no drafts."""
        padding = self._padding(draft_tokens) if self._drafted and self.trims else {}
        if padding:
            draft_tokens = {r: drafts for r, drafts in draft_tokens.items() if r not in padding}
            num_tokens_per_req = {
                r: rows - padding.get(r, 0) for r, rows in num_tokens_per_req.items()
            }
        num_tokens = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        assert self._batch_budget is not None
        drafts, others, budget = self._batch_budget
        chosen = budget
        if not self._drafted:
            chosen = 0
        elif not self.trims:
            chosen = self._all_or_nothing(drafts, others)
        elif self._explores:
            # An exploration that verified nothing would find out nothing.
            room = self._max_total_logits - len(drafts) * self.num_bonus_tokens
            # A number of Python's: of numpy's, torch compiles vLLM's choice anew.
            chosen = max(budget, min(int(np.count_nonzero([*drafts.values()])), room))
        # Whether to draft is another question: the next drafts will be of all requests.
        self._plan({**drafts, **padding}, others, chosen)
        self._batch_budget = drafts, others, chosen
        return num_tokens - budget + chosen

    def _all_or_nothing(self, drafts: Mapping[str, int], others: Mapping[str, int]) -> int:
        """How many draft tokens to verify where batches cannot be trimmed."""
        assert self.cost_tables is not None
        slots, lengths, rows = self._batch(drafts, others)
        most, plain = int(lengths.sum()), int(rows.sum())
        sampling, seconds = self._sampling(slots, rows), self.cost_tables[1]
        # Those without a tree are verified, too: see `_padding`.
        survival = self._survival(slots, lengths)[self._has_tree[slots]]
        expected = sampling + float(survival.sum())
        pays = expected * seconds[plain] > sampling * seconds[plain + most]
        return most if pays or self._explores else 0

    def _padding(self, draft_tokens: Mapping[str, list[int]]) -> dict[str, int]:
        """Draft tokens that are scheduled for requests without a tree, by request.

        vLLM pads a request to a verification where its prompt is cached but for a token, and
        schedules K after a step that did not draft.
        """
        slots = np.fromiter(
            map(self.req_states.req_id_to_index.__getitem__, draft_tokens), np.int64
        )
        has_tree = self._has_tree[slots]
        if has_tree.all():
            return {}
        scheduled = zip(draft_tokens.items(), has_tree, strict=True)
        return {request: len(drafts) for (request, drafts), has in scheduled if not has}

    def _plan(self, drafts: Mapping[str, int], others: Mapping[str, int], chosen: int) -> None:
        """Choose what the beginning step drafts: each request has `drafts` draft and `others` other
        tokens; `chosen` draft tokens are verified.
        """
        slots, lengths, rows = self._batch(drafts, others)
        if lengths.any():
            confidences = self._stale_confidences[self._stale_idx].np[slots[lengths > 0]]
            self._usual += (confidences.mean(axis=0) - self._usual) / MEMORY
        survival = self._survival(slots, lengths)
        sampling, plain = self._sampling(slots, rows), int(rows.sum())
        if chosen:
            best = np.sort(survival, axis=None)[::-1][:chosen]
            self.meter.expect(sampling + float(best.sum()))
        self._learn(survival, slots)
        if not sampling:
            return
        step = self.arms.next(bucket(len(slots)), lambda: self._rates(len(slots), sampling, plain))
        if step.arm and self._plain_steps >= HORIZON:
            self.profile.fade()
            self.match_profile.fade()
        self._plain_steps = 0 if step.arm else self._plain_steps + 1
        self._arm, self._explores = step.arm, step.explores
        if self._arm:
            assert self.cost_tables is not None
            self.cost_tables = self._draft_costs[self._arm - 1], self.cost_tables[1]

    def _batch(self, drafts: Mapping[str, int], others: Mapping[str, int]) -> tuple[Integers, ...]:
        """[R] each: the requests' slots, draft tokens and other tokens."""
        slots = map(self.req_states.req_id_to_index.__getitem__, drafts)
        columns = slots, drafts.values(), others.values()
        return tuple(np.fromiter(column, np.int64) for column in columns)

    def _survival(self, slots: Integers, lengths: Integers) -> Floats:
        """[R, K] of the draft tokens, by confidences of a step ago; 0 beyond `lengths`."""
        confidences = self._stale_confidences[self._stale_idx].np[slots]
        survival = np.cumprod(confidences, axis=1, dtype=np.float64)
        survival[np.arange(survival.shape[1]) >= lengths[:, None]] = 0
        return survival

    def _learn(self, survival: Floats, slots: Integers) -> None:
        """Add the draft that the host reads now to its profile: `slots` [R], survival [R, K]."""
        length, self._read = self._read, None
        if length is None:
            return
        some = slice(None, None, -(-len(slots) // LEARNED_REQUESTS))
        survival, slots = survival[some], slots[some]
        depths = self._depths.read(slots)
        if not length:
            # A text without a match has no node: that is to be learned, too. A new request's
            # confidences are of no draft, as its depths tell.
            known = self._has_tree[slots] & ((depths[:, 0] > 0) | (survival[:, 0] == 0))
            if known.any():
                of_paths = _by_level(survival[known], depths[known], self._depth)
                self.match_profile.drafted(of_paths[:, :, : self._num_paths])
            return
        drafted = (depths[:, 0] > 0) & (survival[:, 0] > 0)
        if drafted.any():
            nodes = _by_level(survival[drafted], depths[drafted], length)
            self.profile.drafted(nodes[:, :, : self._ranks])

    def _rates(self, requests: int, sampling: int, plain: int) -> Floats:
        """Tokens per second of each arm; `sampling` requests output tokens, of `plain` rows."""
        assert self.cost_tables is not None
        seconds = self.cost_tables[1]
        # A full step has no room for nodes: the next one is not expected to be full as well.
        others = min(plain - sampling, seconds.shape[0] - 1 - 2 * sampling)
        verify = seconds[max(others, 0) :]
        most = min(self.num_speculative_steps, (verify.shape[0] - 1) // sampling - 1)
        rates = [sampling / verify[sampling]]
        if not most:
            return np.array(rates + [0.0] * len(self.lengths))
        for costs, length in zip(self._draft_costs, self.lengths, strict=True):
            searched, below = self.profile.survival[:length], self.match_profile.survival[length:]
            nodes = np.concatenate([searched, below], axis=None)
            if self.trims:
                best = best_common_budget(nodes, most, sampling, costs[requests], verify)
                rates.append(best.tokens_per_second)
            else:
                expected = sampling * (1 + np.sort(nodes)[::-1][:most].sum())
                rates.append(expected / (costs[requests] + verify[sampling * (1 + most)]))
        return np.array(rates)

    def _sampling(self, slots: Integers, rows: Integers) -> int:
        """How many requests output a token: not those whose prompt is not read to its end."""
        states = self.req_states
        read = states.num_computed_tokens_np[slots] + rows
        return int(np.count_nonzero(read >= states.prefill_len.np[slots]))


class _StaleDepths:
    """The depths of drafted nodes as they were one record ago; the host reads without waiting.

    They take vLLM's way for confidences: two buffers in turn, behind the same events.
    """

    def __init__(self, depths: Tensor, copy_stream: Any) -> None:
        self._depths, self._copy_stream = depths, copy_stream
        self._buffers = [
            CpuGpuBuffer(*depths.shape, dtype=depths.dtype, device=depths.device) for _ in range(2)
        ]
        self._readable = 0

    def record(self, event: Any, new: Sequence[int]) -> None:
        """Begin to copy the last draft's depths; those copied by the call before can be read now.

        Args:
            event: vLLM's, of its copy of confidences in the same turn, on which it waits.
            new: slots whose requests changed since the draft that can be read now.
        """
        self._readable ^= 1
        self._buffers[self._readable].np[new] = 0
        copied = self._buffers[self._readable ^ 1]
        copied.gpu.copy_(self._depths)
        current = torch.cuda.current_stream(self._depths.device)
        self._copy_stream.wait_stream(current)
        with stream(self._copy_stream, current):
            copied.copy_to_cpu()
            event.record()

    def read(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """[R, K] of slots [R]; 0 where there is no node."""
        depths: npt.NDArray[np.int32] = self._buffers[self._readable].np[slots]
        return depths


def arms_to_explore(lengths: Sequence[int]) -> tuple[int, ...]:
    """Arms (0: plain decoding, then each length) to explore: the longest, and matches alone."""
    longest = len(lengths)
    return (longest,) if lengths[0] else (1, longest)


def _by_level(survival: Floats, depths: npt.NDArray[np.int32], length: int) -> Floats:
    """Nodes [R, L, K] by level and rank within it, of survival [R, K] and depths [R, K] from 1 on.

    Survival descends along a request and is 0 where there is no node.
    """
    at_level = depths[:, :, None] == np.arange(1, length + 1)
    request, node, level = np.nonzero(at_level & (survival > 0)[:, :, None])
    rank = (at_level.cumsum(axis=1) - 1)[request, node, level]
    found = np.zeros((survival.shape[0], length, survival.shape[1]))
    found[request, level, rank] = survival[request, node]
    return found
