"""The frozen target, as training sees it: hidden states, embeddings, logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from vllm_redrafter.config import ConfigError


@dataclass(frozen=True)
class TargetOutputs:
    """What the target says about a batch of B sequences of T tokens.

    Attributes:
        hidden: [B, T, H], the last hidden state after the final norm: what lm_head reads, and
            what the drafter is conditioned on.
        embedded: [B, T, H], the target's input embedding of each token.
        logits: [B, T, V], the target's distribution of the token after each position; empty
            where they were not asked for.
    """

    hidden: Tensor
    embedded: Tensor
    logits: Tensor


def load_target(folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal language model, frozen and in eval mode.

    Raises:
        ConfigError: `folder` has no model that transformers can load.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target {str(folder)!r}: transformers cannot load it as a causal language model; "
            f"give a folder in Hugging Face format: {error}"
        ) from error
    return model.eval().requires_grad_(False)


@torch.no_grad()
def read_target(target: Any, tokens: Tensor, with_logits: bool = True) -> TargetOutputs:
    """Run the target over whole sequences (teacher forcing).

    Padding at the end needs no mask: attention is causal.

    Args:
        target: a transformers causal language model.
        tokens: [B, T] int64.
        with_logits: the vocabulary-wide layer costs as much as some of the others together.
    """
    kept = {} if with_logits else {"logits_to_keep": 1}
    outputs = target(input_ids=tokens, output_hidden_states=True, use_cache=False, **kept)
    return TargetOutputs(
        hidden=outputs.hidden_states[-1],
        embedded=target.get_input_embeddings()(tokens),
        logits=outputs.logits if with_logits else outputs.logits[:, :0],
    )
