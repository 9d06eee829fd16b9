# SPDX-License-Identifier: Apache-2.0
"""The target's input embedding, copied to the last stage of a pipeline, where the drafter reads it.

vLLM loads it on the first stage; on the last only where the output layer is the same table.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_redrafter.engine.embedding import shared_embedding
from vllm_redrafter.utils.errors import ConfigError

_REMEDY = "set --pipeline-parallel-size to 1"


class FirstStageEmbedding:
    """The first stage's layers that the last one lacks, and their copies: made on all stages."""

    def __init__(self, target: nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        """Give the last stage's target these layers, or raise ConfigError; `copy` fills them."""
        pp = get_pp_group()
        self._layers: list[VocabParallelEmbedding] = []
        if pp.is_first_rank:
            layers = {
                name: layer
                for name, layer in target.named_modules()
                if isinstance(layer, VocabParallelEmbedding)
                and not isinstance(layer, ParallelLMHead)
            }
            last = pp.world_size - 1
            pp.send_object({name: _arguments(layer) for name, layer in layers.items()}, dst=last)
            self._layers = [layers[name] for name in pp.recv_object(src=last)]
        elif pp.is_last_rank:
            offered = pp.recv_object(src=0)
            here = dict(target.named_modules())
            missing = [name for name in offered if isinstance(here.get(name), PPMissingLayer)]
            pp.send_object(missing, dst=0)
            for name in missing:
                with set_current_vllm_config(vllm_config), device:
                    layer = VocabParallelEmbedding(**offered[name])
                    # As vLLM does for the layers that it makes: `reload_weights` needs it.
                    record_metadata_for_reloading(layer)
                target.set_submodule(name, layer)
                self._layers.append(layer)
            token = torch.zeros(1, dtype=torch.int64, device=device)
            if not shared_embedding(target)(token).is_floating_point():
                raise ConfigError(
                    f"{type(target).__name__} has an input embedding that the last pipeline stage, "
                    f"which drafts, cannot copy; {_REMEDY}"
                )
        if not all(map(_is_plain, self._layers)):
            raise ConfigError(
                "the target's input embedding is quantised, or more than a table, and the last "
                f"pipeline stage, which drafts, cannot copy it; {_REMEDY}"
            )

    @torch.inference_mode()
    def copy(self) -> None:
        """Copy the weights from the first stage to the last: a collective call."""
        pp = get_pp_group()
        for layer in self._layers:
            if pp.is_first_rank:
                torch.distributed.send(layer.weight, dst=pp.last_rank, group=pp.device_group)
            else:
                torch.distributed.recv(layer.weight, src=pp.first_rank, group=pp.device_group)


def _is_plain(layer: VocabParallelEmbedding) -> bool:
    is_table = type(layer).forward is VocabParallelEmbedding.forward
    return is_table and isinstance(layer.quant_method, UnquantizedEmbeddingMethod)


def _arguments(layer: VocabParallelEmbedding) -> dict[str, Any]:
    """What makes a layer of the same shape, unless it is quantised."""
    return {
        "num_embeddings": layer.num_embeddings,
        "embedding_dim": layer.embedding_dim,
        "params_dtype": next(layer.parameters()).dtype,
        "org_num_embeddings": layer.org_vocab_size,
        "padding_size": layer.padding_size,
        "disable_tp": layer.disable_tp,
    }
