# SPDX-License-Identifier: Apache-2.0
"""Targets that verify a chain in place of a tree, on vLLM's own attention: which, and why.

A tree needs layers whose state is a plain paged KV cache that our attention reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine.refusals import REMEDY_DISABLE

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder

ANNOUNCEMENT = "ReDrafter verifies chains on this target: %s"

NODES_WITH_STATES = 3
"""Default K of targets that keep a recurrent state, of megabytes per layer, for every node."""


def chain_reasons(model: ModelConfig) -> Iterator[str]:
    """Why a tree cannot be verified on this target, by its configuration."""
    if model.use_mla:
        yield "its attention is multi-head latent attention (MLA)"
    if model.is_hybrid:
        yield "its Mamba or linear-attention layers keep a state that no tree can share"
    if model.attention_chunk_size is not None:
        yield f"its attention is local to chunks of {model.attention_chunk_size} tokens"


def layers_without_trees(vllm_config: VllmConfig, backend: type[AttentionBackend]) -> Iterator[str]:
    """Why a tree cannot be verified in layers of the loaded target: they have another backend
    than ours, `backend`, or `tree_obstacles`."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    found: dict[str, list[str]] = {}
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    for name, layer in layers.items():
        spec, its_backend = layer.get_kv_cache_spec(vllm_config), layer.get_attn_backend()
        if spec is None or getattr(layer, "is_draft_layer", False):
            continue
        is_paged = type(spec) in (FullAttentionSpec, SlidingWindowSpec)
        if is_paged and its_backend is backend:
            reasons = getattr(layer.impl, "tree_obstacles", ())
        else:
            reasons = (f"{type(layer).__name__} on {its_backend.__name__}",)
        for reason in reasons:
            found.setdefault(reason, []).append(name)
    for reason, names in found.items():
        yield f"of its layers {len(names)} have {reason} ({names[0]!r} the first)"


def recurrent_refusals(
    vllm_config: VllmConfig, builders: tuple[type[AttentionMetadataBuilder[Any]], ...]
) -> Iterator[str]:
    """Recurrent layers of the loaded target whose metadata is of none of these builders."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    kinds = {
        layer.get_attn_backend()
        for layer in get_layers_from_vllm_config(vllm_config, MambaBase).values()
    }
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        if not issubclass(kind.get_builder_cls(), builders):
            yield f"vLLM verifies no drafts in layers on {kind.__name__} here; {REMEDY_DISABLE}"


def as_chain(config: ReDrafterConfig) -> ReDrafterConfig:
    length = min(config.beam_length, config.num_speculative_tokens)
    return replace(config, tree="chain", beam_length=length)
