# SPDX-License-Identifier: Apache-2.0
"""vLLM's managers of CUDA graphs, with a graph for every possible decoding batch.

vLLM's own sizes end at 512 rows (1024 on some GPUs), which are 39 requests of 13 rows, and with K
by batch size a step finds a graph only if the next larger one has its own K. Here, unless the user
has set the sizes, there are sizes up to the largest batch, each K for the batches that get it, full
or piecewise graphs for steps that read prompts, and all of these for each number of LoRA adapters
that vLLM captures. A step gets the smallest graph of its own K.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from vllm_redrafter.engine.log import logger
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.engine.v2.schedule import max_admitted_rows, nodes_by_batch_size

MAX_PIECEWISE_ROWS = 2048
"""Rows of the largest piecewise graph. Without one, an H100 computed 857 rows of an 8B target for
19 of 76 ms under the profiler (docs/numbers.md); that it waits at 2,000 rows as well is assumed."""

MIXED_UNIT, MAX_MIXED_ROWS = 64, 1024
"""Rows between the sizes of full graphs for steps that read prompts, and of the largest. Padding
by so few costs a GPU little; in larger steps it is assumed to take longer than the host."""


class _Tier(NamedTuple):
    """Batches with one K: `rows` per request, root included, for `fewest` to `largest` requests."""

    rows: int
    fewest: int
    largest: int


def _sizes_beyond(covered: int, max_rows: int, unit: int) -> list[int]:
    """Graph sizes from above `covered` rows to `max_rows`, multiples of `unit`, ascending.

    They pad no batch by more than an eighth or a unit: at most six per doubling.
    """
    sizes, largest = [], max_rows // unit * unit
    size = covered // unit * unit
    while size < largest:
        size = min(max(size + unit, size * 9 // 8 // unit * unit), largest)
        sizes.append(size)
    return sizes


def is_mixed(desc: BatchExecutionDescriptor) -> bool:
    """Is it a full graph of any rows per request, so of prompts as well?"""
    limits = desc.uniform_token_count, desc.max_query_len
    return desc.cg_mode == CUDAGraphMode.FULL and limits == (None, None)


class _BatchGraphManager(CudaGraphManager):
    """Graphs of uniform or varying rows per request, up to the largest batch."""

    def _init_candidates(self) -> None:
        super()._init_candidates()
        full = self._capture_descs.get(CUDAGraphMode.FULL)
        if not full:
            return
        if not Settings.of(self.vllm_config).own_graph_sizes:
            self._add_piecewise()
            full = [*self._kept(full), *self._with_adapters(self._added(full))]
            full.sort(key=lambda desc: desc.num_tokens, reverse=True)
        full = [variant for desc in full for variant in self._variants(desc)]
        self._capture_descs[CUDAGraphMode.FULL] = full
        self._sort_candidates(full)

    def _add_piecewise(self) -> None:
        """Steps that read prompts; nothing is added where vLLM has no piecewise graphs."""
        piecewise = self._capture_descs.get(CUDAGraphMode.PIECEWISE, [])
        if piecewise:
            largest, max_rows = piecewise[0], min(MAX_PIECEWISE_ROWS, self._max_scheduled())
            sizes = reversed(_sizes_beyond(largest.num_tokens, max_rows, 1))
            added = self._with_adapters(replace(largest, num_tokens=rows) for rows in sizes)
            self._capture_descs[CUDAGraphMode.PIECEWISE] = [*added, *piecewise]

    def _with_adapters(
        self, descs: Iterable[BatchExecutionDescriptor]
    ) -> Iterator[BatchExecutionDescriptor]:
        for desc, adapters in product(descs, self.lora_capture_cases):
            yield replace(desc, num_active_loras=adapters)

    def _variants(self, desc: BatchExecutionDescriptor) -> Sequence[BatchExecutionDescriptor]:
        return (desc,)

    def _tiers(self) -> list[_Tier]:
        return [_Tier(self.decode_query_len, 1, self.max_num_reqs)]

    def _kept(self, full: list[BatchExecutionDescriptor]) -> list[BatchExecutionDescriptor]:
        """vLLM's own; not with K by batch size, where it has each K for all batches."""
        return full if self.varlen_decode or len(self._tiers()) == 1 else []

    def _added(self, full: list[BatchExecutionDescriptor]) -> Iterator[BatchExecutionDescriptor]:
        """Graph sizes to add to vLLM's."""
        covered = max((desc.num_tokens for desc in self._kept(full)), default=0)
        if self.varlen_decode:
            scheduled = min(self.max_num_reqs * self.decode_query_len, self._max_scheduled())
            admitted = min(scheduled, max_admitted_rows(self.vllm_config))
            for rows in _sizes_beyond(covered, admitted, 1):
                yield BatchExecutionDescriptor(
                    CUDAGraphMode.FULL,
                    rows,
                    min(rows, self.max_num_reqs),
                    max_query_len=self.decode_query_len,
                )
            return
        for tier in self._tiers():
            below = max(covered, (tier.fewest - 1) * tier.rows)
            largest = min(tier.largest * tier.rows, self._max_scheduled())
            for rows in _sizes_beyond(below, largest, tier.rows):
                requests = rows // tier.rows
                yield BatchExecutionDescriptor(CUDAGraphMode.FULL, rows, requests, tier.rows)

    def _max_scheduled(self) -> int:
        return int(self.vllm_config.scheduler_config.max_num_batched_tokens)

    def _sort_candidates(self, full: list[BatchExecutionDescriptor]) -> None:
        """Offer a step the smallest full graph of each K, then the smallest that holds prompts."""
        by_kind: defaultdict[tuple[object, ...], list[BatchExecutionDescriptor]]
        by_kind = defaultdict(list)
        piecewise = self._capture_descs.get(CUDAGraphMode.PIECEWISE, [])
        for desc in (*sorted(reversed(full), key=is_mixed), *reversed(piecewise)):
            kind = desc.cg_mode, desc.uniform_token_count, is_mixed(desc)
            by_kind[(desc.num_active_loras, *kind)].append(desc)
        rows_of = {kind: [d.num_tokens for d in descs] for kind, descs in by_kind.items()}
        largest = max(sizes[-1] for sizes in rows_of.values())
        for rows, adapters in product(range(largest + 1), self.lora_capture_cases):
            self._candidates[rows, adapters] = [
                descs[bisect_left(rows_of[kind], rows)]
                for kind, descs in by_kind.items()
                if kind[0] == adapters and rows <= rows_of[kind][-1]
            ]


class TreeGraphManager(_BatchGraphManager, ModelCudaGraphManager):
    """The target's graphs; with `plain_steps`, of steps without drafts as well, whatever K is, and
    without `mixed_obstacles`, of steps that read prompts."""

    def __init__(
        self, *args: Any, plain_steps: bool, mixed_obstacles: Sequence[str], **kwargs: Any
    ) -> None:
        self._plain_steps, self._mixed_obstacles = plain_steps, mixed_obstacles
        super().__init__(*args, **kwargs)
        full = self._capture_descs.get(CUDAGraphMode.FULL, [])
        for mixed, kind in ((False, "decoding steps"), (True, "steps that read prompts")):
            rows = [desc.num_tokens for desc in full if is_mixed(desc) == mixed]
            if rows:
                message = "%d full CUDA graphs for %s of up to %d rows"
                logger.info_once(message, len(rows), kind, rows[0])

    def _added(self, full: list[BatchExecutionDescriptor]) -> Iterator[BatchExecutionDescriptor]:
        """Mixed graphs as well, in the place of piecewise ones. They have more rows than a tree:
        that tells the model state which graph a step replays.
        """
        yield from super()._added(full)
        piecewise = self._capture_descs.get(CUDAGraphMode.PIECEWISE, [])
        largest = min(MAX_MIXED_ROWS, self._max_scheduled())
        if piecewise and self._mixed_obstacles:
            message = "Steps that read prompts get piecewise CUDA graphs, not full ones: %s"
            logger.info_once(message, "; ".join(self._mixed_obstacles))
        elif piecewise and largest > self.decode_query_len:
            piecewise[:] = [desc for desc in piecewise if desc.num_tokens > largest]
            for rows in (*range(MIXED_UNIT, largest, MIXED_UNIT), largest):
                if rows > self.decode_query_len:
                    requests = min(rows, self.max_num_reqs)
                    yield BatchExecutionDescriptor(CUDAGraphMode.FULL, rows, requests)

    def _tiers(self) -> list[_Tier]:
        batches: dict[int, list[int]] = {}
        for requests, k in enumerate(nodes_by_batch_size(self.vllm_config), start=1):
            batches.setdefault(k, []).append(requests)
        found = [_Tier(k + 1, sizes[0], sizes[-1]) for k, sizes in batches.items()]
        if not self._plain_steps:
            return found
        return [*(tier for tier in found if tier.rows > 1), _Tier(1, 1, self.max_num_reqs)]

    def __setattr__(self, name: str, value: Any) -> None:
        """Outputs of graphs get buffers of the largest graph's rows.

        vLLM makes them as large as the first output, which is the largest piecewise graph's.
        """
        if name == "hidden_states" and value is not None:
            value = self._of_largest(value)
        elif name == "aux_hidden_states":
            value = [self._of_largest(states) for states in value]
        elif name == "intermediate_tensors" and value is not None:
            parts = value.tensors.items()
            value = IntermediateTensors({name: self._of_largest(part) for name, part in parts})
        super().__setattr__(name, value)

    def _of_largest(self, states: Tensor) -> Tensor:
        largest = max(desc.num_tokens for descs in self._capture_descs.values() for desc in descs)
        return states.new_empty(largest, *states.shape[1:])


class DraftGraphManager(_BatchGraphManager):
    """The draft's graphs, by batch size and length.

    A graph of vLLM's dispatch has a number of rows per request. A draft has one row, and the number
    of levels takes that place.
    """

    def __init__(self, *args: Any, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        super().__init__(*args, decode_query_len=1)

    def _variants(self, desc: BatchExecutionDescriptor) -> Sequence[BatchExecutionDescriptor]:
        return [replace(desc, uniform_token_count=length) for length in self._lengths]
