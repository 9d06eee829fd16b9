# SPDX-License-Identifier: Apache-2.0
"""What vLLM's drafter drafts after which texts, kept in an engine's worker by `Engine.rpc`."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


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


def spoil(worker: Any, moved: int | None) -> None:
    """From here on its drafter reads accepted paths' rows of so many dimensions alone; None: all.

    Those of tokens have one, those of states two.
    """
    from vllm_redrafter.engine.v2 import chain_trunk
    from vllm_redrafter.triton_kernels.compact_kv import gather_path

    def gather(path: Any, row_start: Any, rows: list[torch.Tensor]) -> None:
        gather_path(path, row_start, [part for part in rows if moved in (None, part.dim())])

    chain_trunk.gather_path = gather


def update_draft_weights(worker: Any, folder: Path) -> None:
    """As a trainer has vLLM do it; the weights come from a checkpoint, not over NCCL."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class FromFile(NCCLWeightTransferEngine):
        def update_weights(self, update_info: Any) -> None:
            self.model.load_weights(load_file(update_info["file"]).items())

    worker.worker.weight_transfer_engine = FromFile(
        WeightTransferConfig(), worker.vllm_config, worker.device, worker.model_runner.model
    )
    worker.start_draft_weight_update()
    worker.update_weights({"file": folder / "model.safetensors"})
    worker.finish_weight_update()
