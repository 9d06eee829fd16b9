# SPDX-License-Identifier: Apache-2.0
"""The target's own tokens along a path of each tree, drawn by vLLM's own sampler.

vLLM's rejection sampler knows drafts as chains, and leaves min-p and logit bias out. Here all
requests go through vLLM's plain `Sampler`; those whose tree has the sampled token as a child go
through it again, one depth below, with that token in their output. All parameters act exactly as
in plain decoding, and a request with a seed draws from its own generator, once per token.

Sampling at all nodes at once would be one call, but slower on a CPU, as a walk reaches few of them.
Only the argmax of few logits is computed for all nodes.
"""

from copy import copy
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
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

from vllm_redrafter.drafting.walk import Walk
from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.token_tree import TokenTree

T = TypeVar("T")

AT_ONCE = 2**22
"""Up to so many logits, one argmax of all is faster than a call of the sampler per depth."""

NONE = torch.empty(0, dtype=torch.int64)

PENALTIES = (
    "prompt_token_ids",
    "frequency_penalties",
    "presence_penalties",
    "repetition_penalties",
)


def sample_roots(
    sampler: Sampler, logits: Tensor, metadata: SamplingMetadata, discarded: np.ndarray
) -> SamplerOutput:
    """Sample in a step without drafts, from logits [R, V], which may be changed in place.

    Requests that are `discarded`, [R] bool, have no use for it: their generators stay as they are.
    """
    untouched = _states(metadata, discarded)
    output = _sampled(sampler, logits, metadata)
    _restore(metadata, untouched)
    return output


def sample_paths(
    sampler: Sampler,
    logits: Tensor,
    tree: TokenTree,
    first: Tensor,
    metadata: SamplingMetadata,
    discarded: np.ndarray,
) -> tuple[SamplerOutput, AcceptedPath]:
    """Sample along each request's tree, as far as the sampled tokens are its nodes.

    Args:
        logits: [N, V], the target's at each node.
        tree: R trees with T node slots.
        first: [R] int64, the row of each root's logits; its request's other nodes follow it.
        discarded: [R] bool, see `sample_roots`.

    Returns:
        vLLM's output, tokens [R, T], -1 behind the last one; and the paths.
    """
    walk = Walk(tree)
    if logits.numel() <= AT_ONCE and _only_the_largest(metadata):
        largest = sampler(
            logits=logits, sampling_metadata=replace(metadata, logitsprocs=LogitsProcessors())
        ).sampled_token_ids.squeeze(-1)
        while len(walk.requests):
            walk.go_on(largest[first[walk.requests] + torch.from_numpy(walk.nodes)])
        return SamplerOutput(walk.accepted.output_tokens, None), walk.accepted
    untouched = _states(metadata, discarded)
    logprobs: LogprobsTensors | None = None
    while len(walk.requests):
        requests, nodes = torch.from_numpy(walk.requests), torch.from_numpy(walk.nodes)
        at_depth = _metadata_at_depth(metadata, requests, walk)
        output = _sampled(sampler, logits[first[requests] + nodes], at_depth)
        if output.logprobs_tensors is not None:
            slots = requests * tree.tokens.shape[1] + walk.depth
            logprobs = _scatter_logprobs(
                output.logprobs_tensors, slots, logprobs, tree.tokens.numel()
            )
        walk.go_on(output.sampled_token_ids.squeeze(-1))
    _restore(metadata, untouched)
    accepted = walk.accepted
    return SamplerOutput(accepted.output_tokens, logprobs), accepted


def _only_the_largest(m: SamplingMetadata) -> bool:
    processors = m.logitsprocs.non_argmax_invariant
    return (
        m.all_greedy
        and m.no_penalties
        and m.allowed_token_ids_mask is None
        and not m.bad_words_token_ids
        and m.max_num_logprobs is None
        and not m.logprob_token_ids
        and m.thinking_budget_state_holder is None
        and all(_chosen_processor(each, NONE, 0) is None for each in processors)
    )


def _states(metadata: SamplingMetadata, requests: np.ndarray) -> dict[int, Tensor]:
    return {
        request: generator.get_state()
        for request, generator in metadata.generators.items()
        if requests[request]
    }


def _restore(metadata: SamplingMetadata, states: dict[int, Tensor]) -> None:
    for request, state in states.items():
        metadata.generators[request].set_state(state)


def _sampled(sampler: Sampler, logits: Tensor, m: SamplingMetadata) -> SamplerOutput:
    """As vLLM's sampler, but named tokens' logprobs are only for requests that name some."""
    if m.max_num_logprobs is None or not m.logprob_token_ids:
        return sampler(logits=logits, sampling_metadata=m)
    of_all_tokens = replace(m, max_num_logprobs=-1, logprob_token_ids=None)
    output = sampler(logits=logits, sampling_metadata=of_all_tokens)
    logprobs = output.logprobs_tensors.logprobs
    drawn = output.sampled_token_ids.squeeze(-1).long()
    top = sampler.gather_logprobs(logprobs, m.max_num_logprobs, drawn)
    named = sampler.gather_specific_token_logprobs(logprobs, m.logprob_token_ids, drawn)
    missing = max(named.logprobs.shape[1] - top.logprobs.shape[1], 0)
    top = LogprobsTensors(pad(top[0], (0, missing)), pad(top[1], (0, missing)), top[2])
    naming = torch.tensor(list(m.logprob_token_ids))
    output.logprobs_tensors = _scatter_logprobs(
        LogprobsTensors(*(part[naming] for part in named[:3])), naming, top, len(drawn)
    )
    return output


def _scatter_logprobs(
    found: LogprobsTensors, slots: Tensor, so_far: LogprobsTensors | None, num_slots: int
) -> LogprobsTensors:
    """Put the logprobs of some requests, a row of each, into their slots.

    The first call is for all requests: no later one has more columns.
    """
    if so_far is None:
        so_far = LogprobsTensors(*(p.new_zeros(num_slots, *p.shape[1:]) for p in found[:3]))
    for part, rows in zip(so_far[:3], found[:3], strict=True):
        part[slots, *(slice(width) for width in rows.shape[1:])] = rows
    return so_far


def _metadata_at_depth(m: SamplingMetadata, requests: Tensor, walk: Walk) -> SamplingMetadata:
    """The sampling metadata of `walk.requests`, with their paths' tokens as output."""
    if walk.depth == 0:
        return replace(m, spec_token_ids=None)
    row_of = np.full(len(walk.accepted.num_sampled), -1)
    row_of[walk.requests] = np.arange(len(walk.requests))

    def chosen(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[requests]

    def by_row(by_request: dict[int, T]) -> dict[int, T]:
        return {int(row_of[r]): value for r, value in by_request.items() if row_of[r] >= 0}

    processors = (_chosen_processor(each, requests, walk.depth) for each in m.logitsprocs.all)
    return replace(
        m,
        temperature=chosen(m.temperature),
        top_p=chosen(m.top_p),
        top_k=chosen(m.top_k),
        generators=by_row(m.generators),
        **({} if m.no_penalties else {name: chosen(getattr(m, name)) for name in PENALTIES}),
        # Lists, as vLLM's own code takes them; empty unless a parameter reads them.
        output_token_ids=[
            [*m.output_token_ids[r], *walk.accepted.output_tokens[r, : walk.depth].tolist()]
            for r in (requests.tolist() if m.output_token_ids else ())
        ],
        allowed_token_ids_mask=chosen(m.allowed_token_ids_mask),
        bad_words_token_ids=by_row(m.bad_words_token_ids),
        logprob_token_ids=None if m.logprob_token_ids is None else by_row(m.logprob_token_ids),
        logitsprocs=LogitsProcessors(each for each in processors if each is not None),
        spec_token_ids=None,
    )


def _chosen_processor(
    processor: LogitsProcessor, requests: Tensor, depth: int
) -> LogitsProcessor | None:
    """A built-in processor for requests [A] int64 ascending, `depth` tokens later; None if idle.

    TypeError: it is not built in.
    """
    chosen = copy(processor)
    if isinstance(chosen, MinPLogitsProcessor):
        if not chosen.min_p_count:
            return None
        chosen.min_p = chosen.min_p[requests]
    elif isinstance(chosen, LogitBiasLogitsProcessor):
        if not chosen.biases:
            return None
        entries, chosen.logits_slice = _entries_of(chosen.logits_slice, requests)
        chosen.bias_tensor = chosen.bias_tensor[entries]
    elif isinstance(chosen, MinTokensLogitsProcessor):
        missing = [
            request
            for request, (minimum, output, *_) in chosen.min_toks.items()
            if minimum - len(output) > depth
        ]
        if not missing:
            return None
        short = requests.masked_fill(~torch.isin(requests, torch.tensor(missing)), -1)
        _, chosen.logits_slice = _entries_of(chosen.logits_slice, short)
        _, chosen.restore_logits_slice = _entries_of(chosen.restore_logits_slice, short)
    else:
        name = type(processor).__name__
        raise TypeError(f"ReDrafter cannot apply the logits processor {name}")
    return chosen


def _entries_of(
    entries: tuple[Tensor, Tensor], requests: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Entries (request [E], token [E]) of requests [A]: indices [E'], (row in A, token) [E']."""
    index, row = torch.nonzero(entries[0][:, None] == requests, as_tuple=True)
    return index, (row, entries[1][index])
