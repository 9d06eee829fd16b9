# SPDX-License-Identifier: Apache-2.0
"""What a draft reads of a drafter's weights, and a step of its target's, of one request."""

import re
from typing import Any

import torch

from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.heads.registry import build_head
from vllm_redrafter.heads.speculators import SpeculatorConfig

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_BITS = {"fp8": 8.0, "mxfp4": 4.25}
"""Of quantised weights, with scales; other methods say `bits`."""


def parameters_read(config: HeadConfig, levels: int) -> int:
    """How many a draft of some levels reads, each as often as it does; no rows of embeddings."""
    with torch.device("meta"):
        head = build_head(config)
    selected = config.selected_depths and levels <= 1 + config.selected_depths
    once = {id(head.layer_of(0).weight)} if selected else set()
    for part in (head.fuse, head.selector):
        once |= {id(parameter) for parameter in part.parameters()} if part is not None else set()
    return sum(
        parameter.numel() * (1 if id(parameter) in once else _reads(name, config, levels))
        for name, parameter in head.named_parameters()
    )


def _reads(name: str, config: HeadConfig, levels: int) -> int:
    found = re.match(r"(emb|proj|ln|head)\.(\d+)\.", name)
    if not found or not isinstance(config, SpeculatorConfig):
        return levels
    kind, depth = found[1], int(found[2])
    if kind == "emb":
        return 0
    if not config.tied or (kind, depth) == ("proj", 0):
        return int(depth < levels)
    return levels - 1 if kind == "proj" else levels


def step_bytes(target_config: Any) -> int | None:
    """Weights that a step uses, of a transformers configuration; None where it is of no such kind.

    Of a mixture of experts, those that one token is sent to; of an input embedding, nothing, unless
    it is the output layer as well.
    """
    from transformers import AutoModelForCausalLM

    text = target_config.get_text_config()
    quantised = getattr(target_config, "quantization_config", None) or {}
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    bits = _BITS.get(str(method)) or (quantised.get("bits") if method else None)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
    except (ValueError, AttributeError, TypeError, ImportError):
        return None
    usual = 8 * (getattr(text, "dtype", None) or torch.bfloat16).itemsize
    used = getattr(text, "num_experts_per_tok", None) or 1
    experts = next((n for key in _EXPERTS if (n := getattr(text, key, None))), used)
    embedding = model.get_input_embeddings().weight
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and embedding is not model.get_output_embeddings().weight:
            continue
        is_expert = ".experts." in name
        packed = bits if is_expert or (".layers." in name and method != "mxfp4") else None
        width = packed if packed and parameter.dim() > 1 else usual
        total += parameter.numel() * width / 8 * (used / experts if is_expert else 1)
    return round(total)
