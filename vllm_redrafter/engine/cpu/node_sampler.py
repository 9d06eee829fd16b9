"""The target's token at every node, drawn by vLLM's own sampler.

vLLM's rejection sampler knows drafts as chains, and leaves min-p and logit bias out. Instead every
node becomes a row of its own in vLLM's plain `Sampler`: the request's sampling parameters are
repeated for its rows, and a row's output so far is the request's output and the tokens on the
node's path. All parameters then act exactly as in plain decoding, on trees as well.

A request with a seed draws from its own generator, once per token. All its nodes at depth d use
the draw that plain decoding would use for the (d+1)-th token from here, and the generator is left
behind the draws that were used: the sampled tokens are those of plain decoding.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_redrafter.acceptance import AcceptedPath
from vllm_redrafter.engine.cpu.verification import NodeRows

T = TypeVar("T")

PENALTIES = (
    "prompt_token_ids",
    "frequency_penalties",
    "presence_penalties",
    "repetition_penalties",
)
"""What vLLM's sampler reads where any request has a penalty."""


def sample_roots(
    sampler: Sampler, logits: Tensor, metadata: SamplingMetadata, discarded: np.ndarray
) -> SamplerOutput:
    """Sample in a step without drafts, as plain decoding does.

    Args:
        logits: [R, V], the target's, a row of each request; may be changed in place.
        discarded: [R] bool, requests whose sample is not used: their generators stay as they are.
    """
    untouched = _states(metadata, discarded)
    output = sampler(logits=logits, sampling_metadata=metadata)
    _restore(metadata, untouched)
    return output


def _states(metadata: SamplingMetadata, requests: np.ndarray) -> dict[int, Tensor]:
    """The states of the generators of some requests, [R] bool."""
    return {
        request: generator.get_state()
        for request, generator in metadata.generators.items()
        if requests[request]
    }


def _restore(metadata: SamplingMetadata, states: dict[int, Tensor]) -> None:
    for request, state in states.items():
        metadata.generators[request].set_state(state)


class NodeSampler:
    """Draws at all nodes, keeps the logprobs of the accepted path, settles the generators.

    Use: `sampled = draw(...)`, walk, `output = finish(path)`.
    """

    def __init__(
        self, sampler: Sampler, rows: NodeRows, metadata: SamplingMetadata, discarded: np.ndarray
    ) -> None:
        """Prepare for one step; `discarded` [R] bool marks requests whose sample is not used."""
        self.sampler = sampler
        self.rows = rows
        self.metadata = metadata
        self._untouched = _states(metadata, discarded)
        self._generator_states: dict[int, list[Tensor]] = {}
        self._logprobs: LogprobsTensors | None = None

    def draw(self, logits: Tensor) -> Tensor:
        """Sample at every node.

        Args:
            logits: [N, V], the target's; may be changed in place.

        Returns:
            [N] int32.
        """
        output = self.sampler(logits=logits, sampling_metadata=self._repeated())
        self._logprobs = output.logprobs_tensors
        return output.sampled_token_ids.squeeze(-1)

    def finish(self, accepted: AcceptedPath) -> SamplerOutput:
        """vLLM's output for the accepted paths: tokens [R, T], -1 behind the last one."""
        for request, states in self._generator_states.items():
            used = int(accepted.num_sampled[request])
            self.metadata.generators[request].set_state(states[used])
        _restore(self.metadata, self._untouched)
        logprobs = self._logprobs
        if logprobs is not None:
            row = self.rows.at(accepted.path.clamp(min=0)).flatten()
            logprobs = LogprobsTensors(
                *(part[row] if isinstance(part, Tensor) else part for part in logprobs)
            )
        return SamplerOutput(sampled_token_ids=accepted.output_tokens, logprobs_tensors=logprobs)

    def _repeated(self) -> SamplingMetadata:
        """The requests' sampling metadata, repeated for their rows."""
        m, request = self.metadata, self.rows.request

        def repeat(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[request]

        return replace(
            m,
            temperature=repeat(m.temperature),
            top_p=repeat(m.top_p),
            top_k=repeat(m.top_k),
            generators=self._row_generators(),
            **({} if m.no_penalties else {name: repeat(getattr(m, name)) for name in PENALTIES}),
            output_token_ids=self._row_outputs() if m.output_token_ids else [],
            allowed_token_ids_mask=repeat(m.allowed_token_ids_mask),
            bad_words_token_ids=self._per_row(m.bad_words_token_ids),
            logprob_token_ids=(
                None if m.logprob_token_ids is None else self._per_row(m.logprob_token_ids)
            ),
            logitsprocs=LogitsProcessors(repeated_processors(m.logitsprocs, self.rows)),
            spec_token_ids=None,
        )

    def _per_row(self, per_request: dict[int, T]) -> dict[int, T]:
        """A dict by request as a dict by row; empty, as a rule."""
        return {
            row: value for request, value in per_request.items() for row in self._rows_of(request)
        }

    def _rows_of(self, request: int) -> range:
        first = int(self.rows.first[request])
        return range(first, first + int(self.rows.tree.num_nodes[request]))

    def _row_outputs(self) -> list[list[int]]:
        """What has been output before each row; vLLM's own code takes lists, so this makes them."""
        tree = self.rows.tree
        outputs = []
        for request, committed in enumerate(self.metadata.output_token_ids):
            tokens, parents = tree.tokens[request].tolist(), tree.parents[request].tolist()
            paths: list[list[int]] = [committed]
            for node in range(1, int(tree.num_nodes[request])):
                before = paths[parents[node]]
                # The scheduler's padding, -1, is no output.
                paths.append([*before, tokens[node]] if tokens[node] >= 0 else before)
            outputs.extend(paths)
        return outputs

    def _row_generators(self) -> dict[int, torch.Generator]:
        """A generator per row of a seeded request, standing at its depth's draw."""
        generators = {}
        for request, generator in self.metadata.generators.items():
            states = [generator.get_state()]
            rows = self._rows_of(request)
            depths = self.rows.depth[rows.start : rows.stop].tolist()
            for _ in range(max(depths) + 1):
                # What vLLM's CPU sampler consumes per token (TopKTopPSampler.forward_cpu).
                torch.randint(0, 2**31, (1,), generator=generator)
                states.append(generator.get_state())
            self._generator_states[request] = states
            for row, depth in zip(rows, depths, strict=True):
                generators[row] = torch.Generator()
                generators[row].set_state(states[depth])
        return generators


def repeated_processors(processors: LogitsProcessors, rows: NodeRows) -> list[LogitsProcessor]:
    """vLLM's built-in logits processors that have something to do, acting on rows, not requests.

    Raises:
        TypeError: a processor that is not built in; vLLM refuses those at start-up already when
            it speculates.
    """
    repeated = (_repeated_processor(processor, rows) for processor in processors.all)
    return [processor for processor in repeated if processor is not None]


def _repeated_processor(processor: LogitsProcessor, rows: NodeRows) -> LogitsProcessor | None:
    """None where the processor has nothing to do."""
    repeated = copy(processor)
    if isinstance(repeated, MinPLogitsProcessor):
        if not repeated.min_p_count:
            return None
        repeated.min_p = repeated.min_p[rows.request]
    elif isinstance(repeated, LogitBiasLogitsProcessor):
        if not repeated.biases:
            return None
        entry, row = _entries_per_row(repeated.logits_slice[0], rows)
        repeated.logits_slice = (row, repeated.logits_slice[1][entry])
        repeated.bias_tensor = repeated.bias_tensor[entry]
    elif isinstance(repeated, MinTokensLogitsProcessor):
        if not repeated.min_toks:
            return None
        repeated.logits_slice = _below_minimum(repeated, repeated.logits_slice, rows)
        restored = _below_minimum(repeated, repeated.restore_logits_slice, rows)
        repeated.restore_logits_slice = restored
    else:
        raise TypeError(f"ReDrafter cannot apply the logits processor {type(processor).__name__}")
    return repeated


def _entries_per_row(request: Tensor, rows: NodeRows) -> tuple[Tensor, Tensor]:
    """Entries [E] that name requests, repeated for the requests' rows: (entry, row), [E'] each."""
    request = request.long()
    counts = rows.tree.num_nodes.long()[request]
    entry = torch.arange(request.shape[0]).repeat_interleave(counts)
    offset = torch.arange(entry.shape[0]) - (counts.cumsum(0) - counts)[entry]
    return entry, rows.first[request[entry]] + offset


def _below_minimum(
    processor: MinTokensLogitsProcessor, entries: tuple[Tensor, Tensor], rows: NodeRows
) -> tuple[Tensor, Tensor]:
    """The stop-token entries of rows whose output is still shorter than min_tokens."""
    missing = torch.zeros(rows.first.shape[0], dtype=torch.long)
    for request, (minimum, output, *_) in processor.min_toks.items():
        missing[request] = minimum - len(output)
    entry, row = _entries_per_row(entries[0], rows)
    short = rows.depth[row] < missing[rows.request[row]]
    return row[short], entries[1][entry[short]]
