"""What a draft of each head costs in the CPU engine: its search, on packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from cpu_parts import timing

from heads_parts.eagle import EagleSearch
from heads_parts.training import Material, kept_tokens, new_eagle, settings_of
from heads_parts.variants import Variant
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.training.initialisation import new_drafter
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.tree.policy import search_shape

CONTEXT = 256
"""Tokens that an EAGLE head's attention reads."""


def milliseconds(
    variants: Sequence[Variant],
    config: TrainingConfig,
    material: Material,
    repeats: int,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Medians of a draft for one request in the first shape, the variants in turn.

    The EAGLE head is in plain torch and float32: no engine of ours drafts with one.
    """
    calls = {v.name: _draft(v, config, material, dtype) for v in variants}
    return timing.medians(calls, repeats)


def _draft(
    variant: Variant, config: TrainingConfig, material: Material, dtype: torch.dtype
) -> Callable[[], object]:
    shape = search_shape(material.shapes[0], material.shapes[0].num_speculative_tokens)
    embed = material.target.get_input_embeddings()
    kept = kept_tokens(config, material)
    if variant.head is not None:
        head = new_drafter(material.target, settings_of(variant, config, material), kept)
        width = head.config.hidden_width
        fast = head.to(dtype).eval().requires_grad_(False).packed(packed)
        hidden, root = torch.randn(1, width, dtype=dtype), torch.ones(1, dtype=torch.int64)
        of_dtype = deepcopy(embed).to(dtype)
        return lambda: search(fast, of_dtype, hidden, root, shape)
    eagle = new_eagle(material, 0).requires_grad_(False)
    weight = material.target.get_output_embeddings().weight
    output = packed(weight if kept is None else weight[kept], None)
    tokens = torch.ones(1, CONTEXT + 1, dtype=torch.int64)
    states = torch.randn(1, CONTEXT + 1, material.sizes.hidden_size)
    found = EagleSearch(
        eagle, output, lambda t: t if kept is None else kept[t], embed, tokens, states, shape
    )
    row, last = torch.zeros(1, dtype=torch.int64), torch.tensor([CONTEXT])

    @torch.inference_mode()
    def explore() -> object:
        # An engine would have run the layer at the root, too.
        eagle(embed(tokens[:, -1:]), states[:, -1:])
        return found(row, last)

    return explore
