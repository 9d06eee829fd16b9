# SPDX-License-Identifier: Apache-2.0
"""What vLLM's drafter drafts after which texts, kept in an engine's worker by `Engine.rpc`."""

from typing import Any

import torch


def keep(worker: Any) -> None:
    """Fill `worker.drafted` with texts and drafts from here on, with vLLM's method or with ours."""
    states, speculator = worker.model_runner.req_states, worker.model_runner.speculator
    chain = speculator.trunk.chain if hasattr(speculator, "trunk") else speculator
    own, worker.drafted = chain.propose, []

    def propose(batch: Any, *given: Any, **named: Any) -> Any:
        drafts = own(batch, *given, **named)
        # A dummy step's arguments are named.
        if given and chain.num_speculative_steps > 1:
            for row, slot in enumerate(batch.idx_mapping.tolist()):
                if given[4][row] > 0:
                    text = states.all_token_ids.gpu[slot, : states.total_len.gpu[slot]]
                    worker.drafted.append((text.tolist(), drafts[row].tolist()))
        return drafts

    chain.propose = propose


def kept(worker: Any) -> list[tuple[list[int], list[int]]]:
    """What was drafted since the last call."""
    drafted, worker.drafted = worker.drafted, []
    return drafted


def gather_alone(worker: Any, dimensions: tuple[int, ...]) -> None:
    """From here on only such rows of accepted paths are moved: 1 for tokens, 2 for states."""
    from vllm_redrafter.engine.cuda import chain_trunk
    from vllm_redrafter.triton_kernels.compact_kv import gather_path

    def gather(path: Any, row_start: Any, rows: list[torch.Tensor]) -> None:
        gather_path(path, row_start, [part for part in rows if part.dim() in dimensions])

    chain_trunk.gather_path = gather
