# SPDX-License-Identifier: Apache-2.0
"""vLLM's managers of CUDA graphs, with a graph for every decoding batch that there may be.

vLLM's own sizes end at 512 rows (1024 on some GPUs), which are 39 requests of 13 rows: above them,
every kernel is launched from Python. And with K by batch size a step finds a graph only if the next
larger one happens to be of its own K. So here, unless the user has set the sizes:

- there are sizes up to the largest batch (`graph_sizes.py`);
- each K is captured for the batches that get it;
- steps that read prompts as well, whose attention no full graph holds, get vLLM's piecewise graphs
  up to as many rows as launches may take longer than computing;
- all of these exist for each number of LoRA adapters that vLLM captures;

and a step gets the smallest graph of its own K that it fits in. What the graphs take is vLLM's to
estimate, as ever: it extrapolates from the largest, and keeps that much from the KV cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from vllm_redrafter.engine.cuda.graph_sizes import Tier, sizes_beyond, tiers
from vllm_redrafter.engine.cuda.schedule import most_at_once, nodes_by_batch_size
from vllm_redrafter.engine.speculation import Settings

logger = init_logger("vllm.redrafter")

MOST_WITH_PROMPTS = 2048
"""Rows of the largest piecewise graph. Without one, an H100 computed 857 rows of an 8B target for
19 of 76 ms under the profiler (docs/numbers.md); that it waits at 2,000 rows as well is assumed."""


class BatchGraphManager(CudaGraphManager):
    """Graphs of uniform or varying rows per request, up to the largest batch."""

    def _init_candidates(self) -> None:
        super()._init_candidates()
        full = self._capture_descs.get(CUDAGraphMode.FULL)
        if not full:
            return
        if not Settings.of(self.vllm_config).own_graph_sizes:
            full = [*self._kept(full), *self._with_adapters(self._added(full))]
            full.sort(key=lambda desc: desc.num_tokens, reverse=True)
            self._add_piecewise()
        full = [variant for desc in full for variant in self._variants(desc)]
        self._capture_descs[CUDAGraphMode.FULL] = full
        self._sort_candidates(full)

    def _add_piecewise(self) -> None:
        """For steps that read prompts as well; there are none where vLLM has none."""
        piecewise = self._capture_descs.get(CUDAGraphMode.PIECEWISE, [])
        if piecewise:
            largest = piecewise[0]
            most = min(MOST_WITH_PROMPTS, self._most_scheduled())
            sizes = reversed(list(sizes_beyond(largest.num_tokens, most, 1)))
            added = self._with_adapters(replace(largest, num_tokens=rows) for rows in sizes)
            self._capture_descs[CUDAGraphMode.PIECEWISE] = [*added, *piecewise]

    def _with_adapters(
        self, descs: Iterable[BatchExecutionDescriptor]
    ) -> Iterator[BatchExecutionDescriptor]:
        """Each for every number of LoRA adapters that vLLM captures."""
        for desc, adapters in product(descs, self.lora_capture_cases):
            yield replace(desc, num_active_loras=adapters)

    def _variants(self, desc: BatchExecutionDescriptor) -> Sequence[BatchExecutionDescriptor]:
        """The graphs that there are of a size."""
        return (desc,)

    def _tiers(self) -> list[Tier]:
        return [Tier(self.decode_query_len, 1, self.max_num_reqs)]

    def _kept(self, full: list[BatchExecutionDescriptor]) -> list[BatchExecutionDescriptor]:
        """vLLM's own: with K by batch size it has each K for all batches."""
        return full if self.varlen_decode or len(self._tiers()) == 1 else []

    def _added(self, full: list[BatchExecutionDescriptor]) -> Iterator[BatchExecutionDescriptor]:
        """What there is to be besides."""
        covered = max((desc.num_tokens for desc in self._kept(full)), default=0)
        if self.varlen_decode:
            for rows in sizes_beyond(covered, self._most_admitted(), 1):
                yield BatchExecutionDescriptor(
                    CUDAGraphMode.FULL,
                    rows,
                    min(rows, self.max_num_reqs),
                    max_query_len=self.decode_query_len,
                )
            return
        for tier in self._tiers():
            below = max(covered, (tier.fewest - 1) * tier.rows)
            most = min(tier.most * tier.rows, self._most_scheduled())
            for rows in sizes_beyond(below, most, tier.rows):
                yield BatchExecutionDescriptor(
                    CUDAGraphMode.FULL,
                    rows,
                    rows // tier.rows,
                    uniform_token_count=tier.rows,
                )

    def _most_scheduled(self) -> int:
        return int(self.vllm_config.scheduler_config.max_num_batched_tokens)

    def _most_admitted(self) -> int:
        """Rows of the largest batch that the adaptive budget admits."""
        most = self.max_num_reqs * self.decode_query_len
        return min(most, self._most_scheduled(), most_at_once(self.vllm_config))

    def _sort_candidates(self, full: list[BatchExecutionDescriptor]) -> None:
        """Offer a step the smallest full graph of each K, then the smallest piecewise one."""
        by_kind: defaultdict[tuple[object, ...], list[BatchExecutionDescriptor]]
        by_kind = defaultdict(list)
        for desc in (
            *reversed(full),
            *reversed(self._capture_descs.get(CUDAGraphMode.PIECEWISE, [])),
        ):
            by_kind[desc.num_active_loras, desc.cg_mode, desc.uniform_token_count].append(desc)
        rows_of = {kind: [d.num_tokens for d in descs] for kind, descs in by_kind.items()}
        largest = max(sizes[-1] for sizes in rows_of.values())
        for rows, adapters in product(range(largest + 1), self.lora_capture_cases):
            self._candidates[rows, adapters] = [
                descs[bisect_left(rows_of[kind], rows)]
                for kind, descs in by_kind.items()
                if kind[0] == adapters and rows <= rows_of[kind][-1]
            ]


class TreeGraphManager(BatchGraphManager, ModelCudaGraphManager):
    """The target's graphs."""

    def __init__(self, *args: Any, plain_steps: bool = False, **kwargs: Any) -> None:
        """
        Args:
            args, kwargs: vLLM's.
            plain_steps: whatever K is, there are graphs of steps without drafts as well.
        """
        self._plain_steps = plain_steps
        super().__init__(*args, **kwargs)
        full = self._capture_descs.get(CUDAGraphMode.FULL)
        if full:
            logger.info_once(
                "%d full CUDA graphs for decoding steps of up to %d rows",
                len(full),
                full[0].num_tokens,
            )

    def _tiers(self) -> list[Tier]:
        found = tiers(nodes_by_batch_size(self.vllm_config))
        if not self._plain_steps:
            return found
        return [*(tier for tier in found if tier.rows > 1), Tier(1, 1, self.max_num_reqs)]

    # All graphs leave their output in the same buffers. vLLM makes them as large as the first
    # output that it sees, which is that of the largest piecewise graph; our full ones are larger.

    @property
    def hidden_states(self) -> Tensor | None:
        """[rows of the largest graph, H], the last layer's; None before the first output."""
        return self._hidden_states

    @hidden_states.setter
    def hidden_states(self, first: Tensor | None) -> None:
        self._hidden_states = None if first is None else self._of_largest(first)

    @property
    def aux_hidden_states(self) -> list[Tensor]:
        """Likewise, of each of the layers that are handed out; empty before the first output."""
        return self._aux_hidden_states

    @aux_hidden_states.setter
    def aux_hidden_states(self, first: list[Tensor]) -> None:
        self._aux_hidden_states = [self._of_largest(states) for states in first]

    @property
    def intermediate_tensors(self) -> IntermediateTensors | None:
        """Likewise, what a pipeline stage hands to the next; None before the first output."""
        return self._intermediate_tensors

    @intermediate_tensors.setter
    def intermediate_tensors(self, first: IntermediateTensors | None) -> None:
        self._intermediate_tensors = first
        if first is not None:
            largest = {name: self._of_largest(states) for name, states in first.tensors.items()}
            self._intermediate_tensors = IntermediateTensors(largest)

    def _of_largest(self, states: Tensor) -> Tensor:
        """A buffer like this one, for the rows of any graph."""
        most = max(desc.num_tokens for descs in self._capture_descs.values() for desc in descs)
        return states.new_empty(most, *states.shape[1:])
