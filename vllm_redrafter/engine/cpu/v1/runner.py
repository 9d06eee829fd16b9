# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU model runner with token trees in place of draft chains.

The decoding step, in the order in which vLLM calls the overridden methods:

1. `_prepare_inputs`: look up the trees of the scheduled draft tokens; give their rows the
   positions n + depth (the slots stay linear). `_preprocess`: M-RoPE's positions likewise.
2. `_build_attention_metadata`: hand the trees to the attention layers.
3. `_model_forward`: the target reads all nodes of all requests in one pass.
4. `_sample`: sample along a path of each tree (`path_sampler.py`), compact its KV rows.
5. `propose_draft_token_ids`: search from the last accepted node's hidden state
   (`drafting/drafting.py`).
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    STR_SPEC_DEC_REJECTS_LOGITSPROCS,
    LogitsProcessors,
)
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_redrafter.budget.costs import CHAINS, PLAIN, TREES, CostTable
from vllm_redrafter.budget.planner import BatchPlanner
from vllm_redrafter.drafting.drafting import Drafting
from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.drafting.walk import moves
from vllm_redrafter.engine.chains import ANNOUNCEMENT, as_chain, layers_without_trees
from vllm_redrafter.engine.cpu.attention import TreeAttentionBackend
from vllm_redrafter.engine.cpu.kv_cache import LayerStack, compact, stack_layers
from vllm_redrafter.engine.cpu.v1.context_matching import ContextMatching
from vllm_redrafter.engine.cpu.v1.costs import measure_costs
from vllm_redrafter.engine.cpu.v1.path_sampler import sample_paths, sample_roots
from vllm_redrafter.engine.cpu.v1.proposer import TreeProposer
from vllm_redrafter.engine.cpu.verification import VerificationStep, verification_step
from vllm_redrafter.engine.log import logger
from vllm_redrafter.engine.request_options import requested_nodes
from vllm_redrafter.engine.target_layers import enable_aux_hidden_states, gathered
from vllm_redrafter.tree.context_matches import ContextMatches
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.utils.patching import patched


class CPUTreeModelRunner(CPUModelRunner):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        # vLLM leaves min-p and logit bias out when it speculates; `path_sampler.py` applies them.
        with patched(gpu_model_runner, build_logitsprocs=_builtin_logits_processors):
            super().__init__(vllm_config, device)
        self.stats = StepStats()
        # By request: [2, K+1], parents and depths of the tree drafted last.
        self._links: dict[str, npt.NDArray[np.int32]] = {}
        # Of requests without a tree. A scheduler may pad them to chains of tokens never sampled.
        depth = np.arange(self.proposer.config.num_speculative_tokens + 1, dtype=np.int32)
        self._padding = np.stack([(depth - 1).clip(0), depth])
        self._step: VerificationStep | None = None
        # Each row of logits among all rows; each request's last row of logits, None if its only.
        self._logits_rows: Tensor | None = None
        self._last_rows: Tensor | None = None
        self.use_aux_hidden_state_outputs = bool(self.proposer.target_layers)
        self.drafted = False
        # The step's kind, requests and rows, where its time is comparable.
        self._timed: tuple[int, int, int] | None = None
        # When the last step ended, and its requests.
        self._ended = 0.0
        self._requests_before: list[str] = []
        config, vocab_size = self.proposer.config, self.model_config.get_vocab_size()
        self.matching: ContextMatching | None = None
        if config.context_matches:
            self.matching = ContextMatching(config, vocab_size)
        self.costs: CostTable | None = None
        self.drafting = Drafting(self.proposer, self.stats)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self._verifies_chains:
            return
        if reasons := list(layers_without_trees(self.vllm_config, TreeAttentionBackend)):
            logger.info(ANNOUNCEMENT, "; ".join(reasons))
            self.proposer.config = as_chain(self.proposer.config)

    @property
    def _verifies_chains(self) -> bool:
        return self.proposer.config.tree == "chain"

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        if self.use_aux_hidden_state_outputs:
            enable_aux_hidden_states(self.get_model(), self.proposer.target_layers)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        self._kv_stacks: list[list[LayerStack]] = []  # by cache group
        if self._verifies_chains:
            return  # Their accepted rows are in place.
        layers = self.compilation_config.static_forward_context
        for group in self.kv_cache_config.kv_cache_groups:
            caches = {name: layers[name].kv_cache for name in group.layer_names}
            # Heads of one size are stored alike.
            isas = {cache.shape[-1]: layers[name].isa for name, cache in caches.items()}
            self._kv_stacks.append(stack_layers(caches.values(), isas))
        none = torch.empty(0, dtype=torch.int64)
        # Let numba compile now, not in service.
        compact(self._kv_stacks, self.input_batch.block_table, none, none)

    def prepare_budget(self) -> None:
        """Measure costs, with weights and KV cache in place; plan with them from now on."""
        config = self.proposer.config
        if not config.adaptive:
            return
        started = perf_counter()
        self.costs = measure_costs(self, self.proposer)
        logger.info("ReDrafter measured its costs in %.1f s", perf_counter() - started)
        recorded = self.proposer.recorded
        self.drafting.planner = BatchPlanner(config, self.costs, self.max_num_reqs, recorded)

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self._links.pop(req_id, None)
        self.drafting.forget(req_id)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        if self.matching is not None:
            self.matching.update(scheduler_output, self.requests)
        return super()._update_states(scheduler_output)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Without `speculative_config`, a step that neither verifies nor drafts is faster."""
        if self._skips_draft(scheduler_output):
            self.speculative_config = None
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _skips_draft(self, scheduled: SchedulerOutput) -> bool:
        """Has this step nothing to draft, verify or prefill?"""
        batch = self.input_batch
        return (
            not scheduled.scheduled_new_reqs
            and not scheduled.finished_req_ids
            and not scheduled.scheduled_cached_reqs.resumed_req_ids
            and not scheduled.scheduled_spec_decode_tokens
            and len(scheduled.num_scheduled_tokens) == batch.num_reqs
            and scheduled.total_num_scheduled_tokens == batch.num_reqs
            and self.drafting.skips_draft(batch.req_ids, scheduled.num_spec_tokens_to_schedule)
        )

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> tuple[Tensor, SpecDecodeMetadata | None, int]:
        requests, rows = len(num_scheduled_tokens), scheduler_output.total_num_scheduled_tokens
        if not scheduler_output.scheduled_spec_decode_tokens:
            self._step = None
            self._timed = (PLAIN, requests, rows) if rows == requests else None
            with patched(self, speculative_config=None):
                prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
            self._logits_rows = prepared[0]
            return prepared
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._logits_rows = prepared[0]
        assert prepared[1] is not None
        step = verification_step(
            [self._links.get(request, self._padding) for request in self.input_batch.req_ids],
            prepared[1].num_draft_tokens,
            self.query_start_loc.np[1 : requests + 1],
            self.input_ids.np,
            # The slots have been computed from linear positions by now; RoPE sees the depth.
            self.positions.numpy(),
            rows,
        )
        kind = TREES if step.branching.numel() else CHAINS
        self._step = step
        self._timed = (kind, requests, rows) if step.only_nodes else None
        return prepared

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        # Here, as with pruned videos vLLM computes M-RoPE's positions once more in it.
        prepared = super()._preprocess(*args, **kwargs)
        if self.uses_mrope and self._step is not None:
            self._step.place(self.mrope_positions.cpu)
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        built = super()._build_attention_metadata(*args, **kwargs)
        if self._step is not None and self._step.branching.numel():
            of_layers = built[0]
            for group in (group for groups in self.attn_groups for group in groups):
                plain = of_layers[group.layer_names[0]]
                builder = group.get_metadata_builder()
                with_trees = builder.with_trees(plain, self._step, self.stats)
                of_layers.update(dict.fromkeys(group.layer_names, with_trees))
        return built

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.stats.measure("forward"):
            return super()._model_forward(*args, **kwargs)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if self.speculative_config is not None:
            return super().sample_tokens(grammar_output)
        try:
            output = super().sample_tokens(grammar_output)
        finally:
            self.speculative_config = self.vllm_config.speculative_config
        self.stats.undrafted_steps += 1
        self.drafted = False
        self._time_step(self.input_batch.num_reqs, draft_seconds=0.0)
        return output

    def _sample(
        self, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        assert logits is not None
        step, metadata = self._step, self.input_batch.sampling_metadata
        discarded = self.discard_request_mask.np
        if step is None:
            self._last_rows = None
            output = sample_roots(self.sampler, logits, metadata, discarded)
            if self.proposer.recorder is not None and not discarded[0]:
                self.proposer.recorder.stepped(output.sampled_token_ids[0].tolist())
            return output
        with self.stats.measure("accept"):
            output, accepted = sample_paths(
                self.sampler, logits, step.tree, step.first_logits, metadata, discarded
            )
            self._last_rows = step.first_logits + accepted.last_node
            requests = self.input_batch.req_ids
            sampled = self.input_batch.temperature_cpu[: len(requests)] > 0.0
            self.drafting.observe(requests, sampled, step.tree, accepted)
        with self.stats.measure("compact"):
            source, destination = moves(accepted.path, step.root_rows)
            if source.numel():
                compact(self._kv_stacks, self.input_batch.block_table, source, destination)
        if self.proposer.recorder is not None:
            self.proposer.recorder.verified(step.tree, accepted)
        self.stats.count(step.drafted, accepted.num_sampled.numpy())
        self._step = None
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM rewinds the generators of discarded samples by CUDA's counters, which CPU generators
        # lack; `path_sampler.py` has rewound them already.
        generators = self.input_batch.generators
        discarded = self.discard_request_mask.np
        self.input_batch.generators = {
            request: g for request, g in generators.items() if not discarded[request]
        }
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # The drafter has no maximal position; the scheduler cuts trees at max_model_len.
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Tensor | list[list[int]],
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        max_nodes, before = scheduler_output.num_spec_tokens_to_schedule, self.stats.draft
        drafts: list[list[int]] = []
        active: Sequence[int] = range(len(sampled_token_ids))
        if not all(map(len, sampled_token_ids)):
            active = [i for i in active if len(sampled_token_ids[i])]
        if max_nodes and active:
            batch = self.input_batch
            request_ids = batch.req_ids
            temperatures = batch.temperature_cpu[: len(request_ids)]
            if len(active) < len(request_ids):
                request_ids = [request_ids[i] for i in active]
                temperatures = temperatures[active]
            sampled = temperatures > 0.0
            of_requests = self._max_nodes(request_ids, max_nodes)
            limits = max_nodes, int(of_requests.max())
            shape = self.drafting.plan(request_ids, sampled, *limits) if limits[1] else None
            if shape is not None:
                with self.stats.measure("draft"):
                    roots = torch.tensor([sampled_token_ids[i][-1] for i in active])
                    states = [hidden_states, *(aux_hidden_states or ())]
                    matches = None
                    if self.matching is not None:
                        texts = batch, active, request_ids, sampled
                        learned = self.proposer.match_acceptance.probabilities
                        matches = self.matching.matches(*texts, learned)
                    given = roots, states, of_requests, shape, matches
                    drafts = self._draft(active, request_ids, *given)
                self.drafting.record_draft_time(self.stats.draft - before)
            else:
                self.stats.undrafted_steps += 1
        self.drafted = bool(drafts)
        self._time_step(sum(map(len, sampled_token_ids)), self.stats.draft - before)
        return drafts

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return super().take_draft_token_ids() if self.drafted else None

    def _draft(
        self,
        active: Sequence[int],
        request_ids: list[str],
        roots: Tensor,
        states: Sequence[Tensor],
        max_nodes: npt.NDArray[np.int64],
        shape: SearchShape,
        matches: ContextMatches | None,
    ) -> list[list[int]]:
        """Drafts of all requests; only those that are `active` have any, of max_nodes [R]."""
        assert self._logits_rows is not None
        last_rows = self._last_rows
        rows = self._logits_rows if last_rows is None else self._logits_rows[last_rows]
        hidden = gathered(states, rows[list(active)])
        chain = self._needs_chain(request_ids)
        tree = self.drafting.draft(hidden, roots, chain, max_nodes, shape, matches)
        links = np.stack([tree.parents.numpy(), tree.depths.numpy()], axis=1)
        self._links.update(zip(request_ids, links, strict=True))
        drafts: list[list[int]] = [[] for _ in self.input_batch.req_ids]
        tokens, num_nodes = tree.tokens.tolist(), tree.num_nodes.tolist()
        for i, row, nodes in zip(active, tokens, num_nodes, strict=True):
            drafts[i] = row[1:nodes]
        return drafts

    def _time_step(self, tokens: int, draft_seconds: float) -> None:
        """Record the time between two steps' ends, vLLM's scheduling and output included."""
        timed, self._timed = self._timed, None
        started, self._ended = self._ended, perf_counter()
        before, self._requests_before = self._requests_before, list(self.input_batch.req_ids)
        # The engine may have waited for requests that the last step had not. Mostly they are the
        # same, which is compared sooner.
        requests = self._requests_before
        if timed is not None and (before == requests or set(before).issuperset(requests)):
            self.drafting.record_step_time(timed, tokens, self._ended - started, draft_seconds)

    @property
    def proposer(self) -> TreeProposer:
        assert isinstance(self.drafter, TreeProposer)
        return self.drafter

    def _max_nodes(self, request_ids: list[str], max_nodes: int) -> npt.NDArray[np.int64]:
        """[R]: of each request, by the scheduler's limit and its own."""
        options = [self.requests[request].sampling_params.extra_args for request in request_ids]
        return np.array([requested_nodes(each, max_nodes) for each in options])

    def _needs_chain(self, request_ids: list[str]) -> Tensor | None:
        """[R] bool: requests with a grammar, which vLLM advances along a chain; None if none."""
        params = [self.requests[request].sampling_params for request in request_ids]
        chain = [p is not None and p.structured_outputs is not None for p in params]
        return torch.tensor(chain) if any(chain) else None


def _builtin_logits_processors(
    vllm_config: VllmConfig,
    device: torch.device,
    is_pin_memory: bool,
    is_pooling_model: bool,
    custom_logitsprocs: Any = (),
) -> LogitsProcessors:
    """vLLM's `build_logitsprocs` for plain decoding, without custom processors."""
    if custom_logitsprocs:
        raise ValueError(STR_SPEC_DEC_REJECTS_LOGITSPROCS)
    return LogitsProcessors(
        make(vllm_config, device, is_pin_memory) for make in BUILTIN_LOGITS_PROCESSORS
    )
