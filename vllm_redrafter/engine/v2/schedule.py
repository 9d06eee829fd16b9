# SPDX-License-Identifier: Apache-2.0
"""The number of nodes per request, by batch size.

Verification costs little until a step's products take longer than reading the target's weights:
with 16-bit weights, from as many rows on as the GPU has operations per byte read, its *ridge*. The
adaptive budget measures the costs; without it, K falls so that a batch's rows stay below the ridge.
That is too high for weights of fewer bits, and too low for long contexts or high acceptance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from vllm_redrafter.budget.planner import draft_lengths
from vllm_redrafter.engine.log import logger
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.engine.v2.refusals import adaptive_obstacles
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.utils import names

if TYPE_CHECKING:
    from vllm.config import VllmConfig


GPUS = {
    "A100-SXM4-40GB": (312, 1.555),
    "A100-SXM4-80GB": (312, 2.039),
    "B200": (2250, 8.0),
    "H100 80GB HBM3": (989, 3.35),
    "H100 PCIe": (756, 2.0),
    "H200": (989, 4.8),
    "L4": (121, 0.3),
    "L40S": (362, 0.864),
}
"""By device name, from NVIDIA's data sheets: 10^12 dense bfloat16 operations per second, 10^12
bytes of memory per second."""

USUAL_RIDGE = 206
"""Rows, of GPUs that are not in the table: an H200's."""


def _ridge_of(device_name: str) -> int:
    """Rows from which on 16-bit products take longer than reading the weights."""
    for name, (operations, bandwidth) in GPUS.items():
        if re.search(rf"\b{name}\b", device_name):
            return int(operations / bandwidth)
    return USUAL_RIDGE


def default_schedule(max_nodes: int, requests: int, ridge: int) -> list[tuple[int, int, int]]:
    """K by batch size, so that all nodes and roots are at most `ridge` rows.

    Returns vLLM's `num_speculative_tokens_per_batch_size`: (first, last, K), K being 0 from where a
    node for each request would be too many.
    """

    def nodes(batch: int) -> int:
        return max(0, min(max_nodes, ridge // batch - 1))

    runs = ((k, list(batches)) for k, batches in groupby(range(1, requests + 1), nodes))
    return [(batches[0], batches[-1], k) for k, batches in runs]


def nodes_by_batch_size(vllm_config: VllmConfig) -> Sequence[int]:
    """K for batches of 1, 2, ... requests, as vLLM's scheduler has it."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    speculative = vllm_config.speculative_config
    assert speculative is not None
    max_nodes = vllm_config.num_speculative_tokens
    requests = vllm_config.scheduler_config.max_num_seqs
    schedule = speculative.num_speculative_tokens_per_batch_size
    if schedule is None:
        return [max_nodes] * requests
    lookup: list[int] = build_dynamic_sd_schedule_lookup(schedule, requests, max_nodes)
    return lookup[1:]


def max_step_rows(vllm_config: VllmConfig) -> int:
    """Nodes and roots of all requests in the largest step."""
    nodes = nodes_by_batch_size(vllm_config)
    return max(requests * (k + 1) for requests, k in enumerate(nodes, start=1))


def max_admitted_rows(vllm_config: VllmConfig) -> int:
    """The rows that the adaptive budget admits: no more than are sampled in one chunk."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

    chunk: int = get_max_chunk_logits(vllm_config.model_config.get_vocab_size())
    return max(chunk, vllm_config.scheduler_config.max_num_seqs)


def apply_default_schedule(vllm_config: VllmConfig) -> None:
    """Set K by batch size without a user's or a budget; warn of starved prompts.

    vLLM refuses such a schedule with data parallelism: there K stays. So does a user's scheduler.
    """
    from vllm.platforms import current_platform

    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls is None:
        own = names.V2_ASYNC_SCHEDULER if scheduler.async_scheduling else names.V2_SCHEDULER
        scheduler.scheduler_cls = own
    speculative = vllm_config.speculative_config
    assert speculative is not None
    adaptive = Settings.of(vllm_config).config.adaptive and not any(adaptive_obstacles(vllm_config))
    given = speculative.num_speculative_tokens_per_batch_size is not None
    # Elsewhere, under the interpreter, no name identifies a GPU.
    is_named = current_platform.is_cuda()
    ridge = _ridge_of(current_platform.get_device_name() if is_named else "")
    if (
        not (adaptive or given)
        and vllm_config.parallel_config.data_parallel_size == 1
        and max_step_rows(vllm_config) > ridge
    ):
        schedule = default_schedule(
            vllm_config.num_speculative_tokens, vllm_config.scheduler_config.max_num_seqs, ridge
        )
        speculative.num_speculative_tokens_per_batch_size = schedule
        logger.info(
            "Without a budget, num_speculative_tokens by batch size is %s: about %d rows are "
            "verified for what one costs. Set num_speculative_tokens_per_batch_size to choose; "
            "[[1, 1, %d]] keeps it constant.",
            schedule,
            ridge,
            vllm_config.num_speculative_tokens,
        )
    _warn_of_starved_prompts(vllm_config)


def _warn_of_starved_prompts(vllm_config: VllmConfig) -> None:
    scheduler = vllm_config.scheduler_config
    budget, rows = scheduler.max_num_batched_tokens, max_step_rows(vllm_config)
    if rows <= budget:
        return
    nodes = nodes_by_batch_size(vllm_config)
    first = next(n for n, k in enumerate(nodes, start=1) if n * (k + 1) > budget)
    logger.warning(
        "max_num_seqs=%d requests with up to num_speculative_tokens=%d nodes are up to %d rows in "
        "a step, and max_num_batched_tokens=%d: from %d decoding requests on no prompt is read, "
        "and some requests have to wait. Raise --max-num-batched-tokens to more than %d, or lower "
        "--max-num-seqs, num_speculative_tokens or num_speculative_tokens_per_batch_size.",
        scheduler.max_num_seqs,
        vllm_config.num_speculative_tokens,
        rows,
        budget,
        first,
        rows,
    )


def lengths_of_drafts(
    vllm_config: VllmConfig, shape: SearchShape, fixed: bool, matches: bool = False
) -> tuple[int, ...]:
    """The levels that drafts may search, ascending, up to those of `shape`.

    `fixed`: the schedule, not a budget, says how many nodes are verified. `matches`: a budget may
    choose matches alone.
    """
    longest = shape.beam_length
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return (longest,)  # Each length is compiled when its graph is captured.
    lengths = draft_lengths(longest)
    if not fixed:
        return (0, *lengths) if matches else lengths
    wanted = {length_for(lengths, k) for k in nodes_by_batch_size(vllm_config) if k}
    return tuple(sorted(wanted | {longest}))


def length_for(lengths: Sequence[int], nodes: int) -> int:
    """The shortest of ascending lengths that has all levels of any tree of so many nodes."""
    return next((length for length in lengths if length >= nodes), lengths[-1])
