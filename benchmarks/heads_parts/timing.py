"""What a draft of each head costs in the CPU engine: its search, on packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from cpu_parts import timing

from heads_parts.training import Material, kept_tokens, new_variant, settings_of
from heads_parts.variants import Variant
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.tree.policy import search_shape


def milliseconds(
    variants: Sequence[Variant],
    config: TrainingConfig,
    material: Material,
    repeats: int,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Medians of a draft for one request in the first shape, the variants in turn."""
    calls = {v.name: _draft(v, config, material, dtype) for v in variants}
    return timing.medians(calls, repeats)


def _draft(
    variant: Variant, config: TrainingConfig, material: Material, dtype: torch.dtype
) -> Callable[[], object]:
    shape = search_shape(material.shapes[0], material.shapes[0].num_speculative_tokens)
    embed = material.target.get_input_embeddings()
    kept = kept_tokens(config, material)
    head = new_variant(settings_of(variant, config, material), material, kept)
    width = head.config.hidden_width
    fast = head.to(dtype).eval().requires_grad_(False).packed(packed)
    hidden, root = torch.randn(1, width, dtype=dtype), torch.ones(1, dtype=torch.int64)
    of_dtype = deepcopy(embed).to(dtype)
    return lambda: search(fast, of_dtype, hidden, root, shape)
