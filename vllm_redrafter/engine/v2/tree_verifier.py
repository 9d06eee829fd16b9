# SPDX-License-Identifier: Apache-2.0
"""Verification: vLLM's sampler draws at every node, and the path that it drew is accepted.

Noise is keyed by the request's seed and the position n + depth, so a node on the accepted path
draws the token that plain decoding draws there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    _iter_request_chunks,
    get_max_chunk_logits,
)

from vllm_redrafter.engine.v2.stats import StepTimer
from vllm_redrafter.engine.v2.verification import Verification
from vllm_redrafter.triton_kernels.accept_path import AcceptedPaths, SampledRows, accept_path


@dataclass(frozen=True)
class _Chunk:
    """Consecutive requests of a batch, and their rows of logits.

    `first` [N + 1] int32 are the requests' first rows within the chunk; `first_np` is the same on
    the host. It is None for the whole batch, which may have been trimmed on the device.
    """

    requests: slice
    rows: slice
    first: Tensor
    first_np: np.ndarray | None


class TreeVerifier:
    """The model runner's rejection sampler, in steps that verify drafts."""

    # What vLLM's warm-up asks a rejection sampler. There is nothing to turn off: rows are found by
    # what the device says of them, trimmed or not.
    enable_adaptive_verification = False

    def __init__(self, sampler: Sampler, verification: Verification, meter: StepTimer) -> None:
        self.sampler, self.verification, self.meter = sampler, verification, meter

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Accept a path of every request, compact its KV rows.

        Args:
            logits: [rows, V], request by request, nodes in order; positions are n + depth.
            draft_logits: None, the drafter being a point mass.
            invalid_drafts: [rows] bool or None: draft tokens that no grammar has checked.

        Returns:
            The accepted tokens [R, K+1], -1 after them, and their logprobs, in new tensors: vLLM
            copies them to the host during the next step.
        """
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        staged, requests = self.verification.staged, input_batch.num_reqs
        if invalid_drafts is not None:
            _invalidate(staged.tokens, input_batch, invalid_drafts)
        out = AcceptedPaths(
            tokens=staged.tokens.new_empty(requests, staged.tokens.shape[1]),
            num_sampled=staged.tokens.new_empty(requests),
            num_rejected=staged.tokens.new_empty(requests),
            path=self.verification.path,
            last_rows=self.verification.last_rows,
            counts=self.meter.counts,
        )
        slots = input_batch.idx_mapping_np
        dims = self.sampler.get_logprobs_dims(slots)
        copied = dims is not None or bool(self.sampler.needs_logits_processing[slots].any())
        chunks = _chunks(logits, input_batch, copied)
        with self.meter.measure("accept"):
            logprobs = [
                self._verify(logits[chunk.rows], input_batch, chunk, out, dims) for chunk in chunks
            ]
        with self.meter.measure("compact"):
            self.verification.compact(out.num_sampled)
        self.verification.copy_num_nodes(requests)
        self.meter.stats.steps += 1
        return SamplerOutput(
            sampled_token_ids=out.tokens,
            logprobs_tensors=_joined(logprobs, input_batch),
            num_nans=num_nans,
            num_sampled=out.num_sampled,
            num_rejected=out.num_rejected,
        )

    def _verify(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        chunk: _Chunk,
        out: AcceptedPaths,
        dims: tuple[int, int] | None,
    ) -> LogprobsTensors | None:
        """Draw at the chunk's nodes and walk: fills its part of `out`."""
        requests, rows = chunk.requests, chunk.rows
        logits_indices = input_batch.logits_indices[rows]
        sampled, processed_logits = self.sampler.sample(
            logits,
            input_batch.expanded_idx_mapping[rows],
            input_batch.idx_mapping[requests],
            input_batch.idx_mapping_np[requests],
            input_batch.positions[logits_indices],
            input_batch.input_ids[logits_indices],
            input_batch.expanded_local_pos[rows],
            input_batch.seq_lens_cpu_upper_bound.numpy()[requests],
            return_logprobs=dims is not None,
        )
        of_batch = SampledRows(
            input_batch.cu_num_logits,
            input_batch.logits_indices,
            input_batch.seq_lens,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        accept_path(self.verification.staged, of_batch, sampled, out, requests, rows.start)
        if dims is None:
            return None
        if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES:
            logits = processed_logits
        parts = out.tokens[requests], out.path[requests]
        return self._logprobs(logits, input_batch, chunk, *parts, dims)

    def _logprobs(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        chunk: _Chunk,
        tokens: Tensor,
        path: Tensor,
        dims: tuple[int, int],
    ) -> LogprobsTensors:
        """Along the accepted paths: request r's first row is its first output token's."""
        num_logprobs, max_token_ids = dims
        depth = input_batch.expanded_local_pos[chunk.rows].long()
        row = torch.arange(logits.shape[0], device=logits.device)
        request = torch.searchsorted(chunk.first[1:], row.to(torch.int32), right=True)
        # Rows beyond a path's end are of no output token; they repeat its root.
        node = path[request, depth].clamp(min=0)
        return compute_topk_scores(
            logits[chunk.first[request] + node],
            num_logprobs,
            tokens[request, depth].clamp(min=0).long(),
            # A copy, as vLLM reads it on the host while the next step writes the original.
            chunk.first.clone() if chunk.first_np is None else chunk.first_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=input_batch.expanded_idx_mapping[chunk.rows],
            max_per_req_token_ids=max_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


def _chunks(logits: Tensor, batch: InputBatch, copied: bool) -> list[_Chunk]:
    """The batch in parts that keep the sampler's copies of logits, if it makes any, below 1 GB."""
    limit = get_max_chunk_logits(logits.shape[1])
    if logits.shape[0] <= limit or not copied:
        everything = slice(0, batch.num_reqs), slice(0, logits.shape[0])
        return [_Chunk(*everything, batch.cu_num_logits, None)]
    ends, chunks = batch.cu_num_logits_np, []
    assert ends[-1] == logits.shape[0], "vLLM no longer trims batches to one chunk of logits"
    for start, end in _iter_request_chunks(ends, limit):
        rows = slice(int(ends[start]), int(ends[end]))
        first = batch.cu_num_logits[start : end + 1]
        first = first - rows.start if rows.start else first
        chunks.append(_Chunk(slice(start, end), rows, first, ends[start : end + 1] - rows.start))
    return chunks


def _invalidate(tokens: Tensor, input_batch: InputBatch, invalid_drafts: Tensor) -> None:
    """Make invalid draft tokens unlike any that can be drawn; `tokens` [R, K+1]."""
    row = torch.arange(invalid_drafts.shape[0], dtype=torch.int32, device=tokens.device)
    request = torch.searchsorted(input_batch.cu_num_logits[1:], row, right=True)
    node = input_batch.expanded_local_pos.long()
    valid = tokens[request, node].masked_fill(invalid_drafts, -1)
    tokens.index_put_((request, node), valid)


def _joined(chunks: list[LogprobsTensors | None], batch: InputBatch) -> LogprobsTensors | None:
    parts = [part for part in chunks if part is not None]
    if len(parts) <= 1:
        return parts[0] if parts else None
    return LogprobsTensors.cat(parts, cu_num_generated_tokens=batch.cu_num_logits_np.tolist())
