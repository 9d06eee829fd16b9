# SPDX-License-Identifier: Apache-2.0
"""How many nodes a batch verifies, and whether and how far it drafts: on the host, of stale values.

vLLM's adaptive verification, with the choices of `throughput_model.py`, from confidences of a step
ago: nothing waits for the device. The device admits each request's first nodes. These are again a
tree, as nodes come in the order of their survival. A draft of length 0 has matches alone.

Some attention backends, those of recurrent states among them, cannot read batches that were trimmed
on the device: there a step verifies all that was drafted, or nothing.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu.async_utils import StepTimingSample, stream
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_redrafter.budget.acceptance import LEAST_SURVIVAL, SurvivalProfile
from vllm_redrafter.budget.choice import Flags, Floats
from vllm_redrafter.budget.costs import bucket
from vllm_redrafter.budget.planner import ArmChoice
from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED, PerSampling
from vllm_redrafter.engine.v2.stats import StepTimer
from vllm_redrafter.engine.v2.step_times import StepTimes
from vllm_redrafter.engine.v2.throughput_model import Batch, ThroughputModel
from vllm_redrafter.triton_kernels.admit_nodes import admit_nodes
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees

MEMORY = 16.0
"""Window, in steps, of the running mean that initialises a new request."""
LEARNED_REQUESTS = 32
"""The most requests of a draft that the host learns from."""
PROFILE_REPLAYS = 3
"""How often a draft shorter than the longest is timed at start-up; vLLM times the longest."""


class TreeBudget(AdaptiveVerificationManager):
    """The batch's budget, decided on the host from values of a step ago.

    vLLM expects that a new request accepts all nodes, and would draft for all requests whenever one
    arrives. Here a new request is expected to accept as the running mean of the others of its kind.
    """

    _batch_budget: tuple[dict[str, int], dict[str, int], int] | None
    cost_tables: tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.floating[Any]]] | None

    def __init__(
        self,
        *args: Any,
        meter: StepTimer,
        lengths: Sequence[int],
        trees: ScoredTrees,
        samples: Flags,
        recorded: PerSampling = NOTHING_RECORDED,
        paths: tuple[int, int] = (0, 0),
        is_chain: bool = False,
        follows: bool = False,
        trims: bool = True,
        **kwargs: Any,
    ) -> None:
        """vLLM's arguments, and:

        Args:
            meter: counts decisions.
            lengths: the draft lengths there are, ascending.
            trees: those drafted last, by slot.
            samples: [slots] on the host, which requests sample.
            recorded: the drafter's measured acceptance.
            paths: M and D of the prompt-lookup matches.
            is_chain: drafts are single paths.
            follows: the drafter has a cache, and reads the rows of steps without a draft as well.
            trims: the target's attention reads trimmed batches.
        """
        super().__init__(*args, **kwargs)
        self.trims, self._follows = trims, follows
        self.meter, self.lengths, self.samples = meter, tuple(lengths), samples
        longest = self.lengths[-1]
        self._arm, self._explores = len(self.lengths), False
        (num_paths, depth), nodes = paths, int(self.num_speculative_steps)
        ranks = 1 if is_chain else nodes
        of_matches = SurvivalProfile(depth, min(num_paths, ranks))
        profiles = SurvivalProfile(longest, ranks, recorded), of_matches
        # Plain decoding, matches alone where there are any, and the longest drafts.
        explored = sorted({0, int(not self.lengths[0]), len(self.lengths)})
        self.arms = ArmChoice(explored, profiles)
        self.times = StepTimes(lambda known: get_tp_group().broadcast_object(known, src=0))
        self.model = ThroughputModel(self.times, profiles, self.lengths, nodes, trims)
        self._trees, self._device = trees, trees.shown.device
        self._first_logits = torch.zeros_like(self.query_start_loc)
        # In place of vLLM's buffers, those of confidences and depths together.
        self._copies = [
            CpuGpuBuffer(*trees.shown.shape, dtype=torch.int32, device=self._device)
            for _ in range(2)
        ]
        parts = [copy.np[:, :-1, 1:] for copy in self._copies]
        self._stale_depths = [depths for depths, _ in parts]
        self._confidences = [confidences.view(np.float32) for _, confidences in parts]
        for confidences in self._confidences:
            confidences.fill(1.0)
        # Lengths of the current draft, and of those whose confidences are copied and read.
        self._length = longest
        self._copied: int | None = longest
        self._read: int | None = None
        self._profiled: list[int] = []
        # Did the last step draft; has the host read the confidences of the last drafts?
        self._drafted, self._up_to_date = True, False
        # Of greedy and of sampled requests.
        self._usual = np.ones((2, self.num_speculative_steps), dtype=np.float32)
        # By slot: did its request's last step draft?
        self._has_tree = np.zeros(self.req_states.max_num_reqs, dtype=np.bool_)
        self._requests: Set[str] = frozenset()
        # What the running step's tokens would take in plain steps, in ms.
        self._plain = 0.0
        # The sum of survival over the running step's nodes, of greedy and of sampled requests; of
        # earlier ones, and how many were accepted.
        self.expected: npt.NDArray[Any] = np.zeros(2)
        self.judged: deque[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = deque()

    @property
    def drafts(self) -> bool:
        """Is the running step planned with a draft?"""
        return self._arm > 0

    def drafts_now(self, possible: bool) -> bool:
        """Shall the running step end with a draft? `possible`: the next step has room for one."""
        self._drafted = possible and self.drafts
        return self._drafted

    def next_length(self, limit: int) -> int:
        """How many levels the next draft searches, at most `limit`: no deeper node is verified."""
        self._length = min(self.lengths[self._arm - 1], limit)
        return self._length

    @property
    def _measured(self) -> tuple[int, ...]:
        """The lengths whose costs are measured: 0 is of what a step's end costs in any case."""
        return tuple(sorted({*self.lengths, *[0] * self._follows}))

    @property
    def profiled_length(self) -> int | None:
        """How many levels a dummy run's draft searches while costs are measured."""
        return self._profiled[-1] if self._profiled else None

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
            shorter = self._measured[:-1] if has_graph and requests not in known else ()
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
        draft_costs = []
        for length in self._measured:
            # vLLM takes drafts' costs from full graphs alone, steps' from all samples.
            super().set_initial_cost_curves(
                [
                    sample if taken == length else replace(sample, full_cudagraph=False)
                    for sample, taken in zip(samples, profiled, strict=True)
                ]
            )
            assert self.cost_tables is not None
            draft_costs.append(self.cost_tables[0])
        assert self.cost_tables is not None
        if self._follows:
            self.model.follow_costs = draft_costs[0]
        draft_costs = draft_costs[-len(self.lengths) :]
        self.model.draft_costs, self.model.verify_costs = draft_costs, self.cost_tables[1]
        # A kernel is compiled at its first use.
        self._batch_budget = {"": 0}, {"": 1}, 0
        self.reallocate_drafts([""], torch.zeros(1, dtype=torch.int64, device=self._device))

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: Tensor) -> tuple[Any, ...]:
        """As vLLM does, in one launch."""
        assert self._batch_budget is not None
        drafts, others, chosen = self._batch_budget
        self._batch_budget = None
        scheduled = np.array([[of[i] for i in req_ids] for of in (drafts, others)], dtype=np.int32)
        admit_nodes(
            self._trees.probs,
            idx_mapping,
            async_tensor_h2d(scheduled, device=self._device),
            chosen,
            int(scheduled[1].sum()) + chosen,
            self._first_logits,
            self.query_start_loc,
        )
        starts = self._first_logits[: len(req_ids) + 1], self.query_start_loc, chosen
        # vLLM 0.33 adds counts on the host, which batch-sharded sampling alone asks for.
        return (*starts, None) if hasattr(self, "_copy_admitted_drafts_to_host") else starts

    def add_request(self, req_idx: int) -> None:
        """Nothing is verified of it before `record_confidences`, when its kind is known as well."""
        self._pending_resets.append(req_idx)
        self._has_tree[req_idx] = False

    def record_confidences(self, confidence_probs: Tensor, input_batch: InputBatch) -> None:
        """As vLLM does, of confidences and depths, which drafts wrote by slot; in steps that
        drafted, and once more after the last of these: a copy to the host is read a record later.
        """
        self._has_tree[input_batch.idx_mapping_np] = self._drafted
        if not self._drafted and self._up_to_date:
            return
        self._up_to_date = not self._drafted
        begin, written = perf_counter(), self._stale_idx
        self._stale_idx ^= 1
        with gpu_sync_allowed():
            self._copy_events[self._stale_idx].synchronize()  # The last step's.
        self.times.waited += 1e3 * (perf_counter() - begin)
        new = self._pending_resets
        self._confidences[self._stale_idx][new] = self._usual[self.samples[new].astype(np.int64)]
        self._stale_depths[self._stale_idx][new] = 0
        new.clear()
        copied, current = self._copies[written], torch.cuda.current_stream(self._device)
        copied.gpu.copy_(self._trees.shown)
        self._copy_stream.wait_stream(current)
        with stream(self._copy_stream, current):
            copied.copy_to_cpu()
            self._copy_events[written].record()
        self._read, self._copied = self._copied, self._length if self._drafted else None

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Rows of the step's batch, trimmed; no draft rows where the last step made no drafts.

        Also chooses whether and how far the step drafts.
        """
        now, ids = 1e3 * perf_counter(), num_tokens_per_req.keys()
        # An engine without requests takes no step.
        goes_on = not ids.isdisjoint(self._requests)
        if goes_on and self._plain:
            self.meter.stats.decoding_seconds += 1e-3 * (now - self.times.began)
            self.meter.stats.plain_seconds += 1e-3 * self._plain
        for judged in self.times.ended(now, goes_on, self.judged):
            self.model.profile.verified(*judged)
            self.model.match_profile.verified(*judged)
        self._requests = ids
        batch = self._batch(num_tokens_per_req, draft_tokens)
        survival = self._survival(batch)
        self.expected = np.zeros(2)
        chosen = self._nodes(batch, survival) if self._drafted else 0
        self._learn(batch, survival)
        if batch.sampling:
            nodes = self.num_speculative_steps
            step = self.arms.next(batch.sampled, nodes, lambda: self.model.rates(batch))
            self._arm, self._explores = step.arm, step.explores
        kind = self._arm > 0, chosen > 0, batch.reads_prompts
        table = self.model.table(batch, self._arm)[chosen]
        self.times.begins(now, kind, len(batch.slots), float(table))
        accepted = float(self.expected @ self.model.profile.acceptance_ratio)
        self.model.stepped(batch, accepted)
        self._plain = 0.0
        plain, requests = (False, False, False), len(batch.slots)
        timed = not batch.reads_prompts and (plain, bucket(requests)) in self.times.medians
        if timed and batch.sampling:
            ms = self.times.milliseconds(plain, requests, self.model.table(batch, 0)[:1])
            self._plain = float(ms[0]) * (1.0 + accepted / batch.sampling)
        columns = (batch.admissible.tolist(), batch.others.tolist())
        drafts, others = (dict(zip(ids, column, strict=True)) for column in columns)
        self._batch_budget = drafts, others, chosen
        return int(batch.others.sum()) + chosen

    def _batch(
        self, num_tokens_per_req: Mapping[str, int], draft_tokens: Mapping[str, list[int]]
    ) -> Batch:
        states, count = self.req_states, len(num_tokens_per_req)
        numbers = states.req_id_to_index
        slots = np.fromiter(map(numbers.__getitem__, num_tokens_per_req), np.int64, count)
        lengths = (len(draft_tokens.get(request, ())) for request in num_tokens_per_req)
        scheduled = np.fromiter(lengths, np.int64, count)
        others = np.fromiter(num_tokens_per_req.values(), np.int64, count) - scheduled
        admissible = scheduled
        if self._drafted and self.trims:
            # vLLM pads a request to a verification where its prompt is cached but for a token, and
            # schedules K after a step that did not draft.
            admissible = np.where(self._has_tree[slots], scheduled, 0)
        # Those whose prompt is not read to its end output no token.
        read = states.num_computed_tokens_np[slots] + others
        sampling = int(np.count_nonzero(read >= states.prefill_len.np[slots]))
        sampled, reads_prompts = self.samples[slots], bool((others > 1).any())
        return Batch(slots, scheduled, admissible, others, sampled, sampling, reads_prompts)

    def _nodes(self, batch: Batch, survival: Floats) -> int:
        """How many draft tokens the step verifies."""
        room = max(0, self._max_total_logits - len(batch.slots) * self.num_bonus_tokens)
        of_trees = survival * self._has_tree[batch.slots, None]
        # In the device's order, which knows no ratios.
        first = np.argsort(of_trees, axis=None)[::-1][: min(int(batch.admissible.sum()), room)]
        ranked = of_trees.ravel()[first]
        kinds = batch.sampled[first // of_trees.shape[1]].astype(np.int64)
        ratios = self.model.profile.acceptance_ratio
        chosen = self.model.best_number(batch, self._arm, ranked * ratios[kinds])
        if self._explores:
            # An exploration that verified nothing would find out nothing.
            each = int(np.count_nonzero(batch.admissible))
            chosen = max(chosen, min(each, len(ranked))) if self.trims else len(ranked)
        if chosen:
            self.expected = np.bincount(kinds[:chosen], ranked[:chosen], 2)
            verifying = np.count_nonzero(of_trees[:, 0] >= max(ranked[chosen - 1], LEAST_SURVIVAL))
            self.meter.stats.expected_tokens += float(verifying + self.expected @ ratios)
        return chosen

    def _survival(self, batch: Batch) -> Floats:
        """[R, K] of the draft tokens, by confidences of a step ago; 0 beyond those scheduled."""
        confidences = self._confidences[self._stale_idx][batch.slots]
        for usual, of_kind in zip(self._usual, (~batch.sampled, batch.sampled), strict=True):
            some = of_kind & (batch.admissible > 0)
            if some.any():
                usual += (confidences[some].mean(axis=0) - usual) / MEMORY
        survival = np.cumprod(confidences, axis=1, dtype=np.float64)
        survival[np.arange(survival.shape[1]) >= batch.scheduled[:, None]] = 0
        return survival

    def _learn(self, batch: Batch, survival: Floats) -> None:
        """Add the draft that the host reads now to its profile."""
        length, self._read = self._read, None
        if length is None:
            return
        some = slice(None, None, -(-len(batch.slots) // LEARNED_REQUESTS))
        survival, slots = survival[some], batch.slots[some]
        depths = self._stale_depths[self._stale_idx][slots]
        known, has_nodes = depths[:, 0] > 0, survival[:, 0] > 0
        if length:
            profile, known = self.model.profile, known & has_nodes
        else:
            # A text without a match has no node: that is to be learned, too. A new request's
            # confidences are of no draft, as its depths tell.
            profile, known = self.model.match_profile, self._has_tree[slots] & (known | ~has_nodes)
        if known.any():
            _, longest, ranks = profile.survival.shape
            nodes = _by_level(survival[known], depths[known], length or longest)
            profile.drafted(nodes[:, :, :ranks], batch.sampled[some][known])


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
