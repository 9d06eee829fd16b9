"""The frozen target, as training sees it: hidden states, embeddings, logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from vllm_redrafter.errors import ConfigError
from vllm_redrafter.training.batches import TextBatch


@dataclass(frozen=True)
class TargetOutputs:
    """What the target says about a batch of B blocks of T tokens.

    Attributes:
        hidden: [B, T, H], the last hidden state after the final norm: what lm_head reads, and
            what the drafter is conditioned on.
        embedded: [B, T, H], the target's input embedding of each token.
    """

    hidden: Tensor
    embedded: Tensor


def load_target(
    name: str | Path, dtype: torch.dtype | str = torch.float32, device: torch.device | str = "cpu"
) -> Any:
    """Load a causal language model, frozen and in eval mode.

    Args:
        name: a folder, or a hub repository's id.
        dtype: of its parameters, or its name; "auto" for the checkpoint's own.
        device: where to put it.

    Raises:
        ConfigError: `name` has no model that transformers can load.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(str(name), dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target {str(name)!r}: transformers cannot load it as a causal language model; "
            f"give a folder in Hugging Face format, or a hub id: {error}"
        ) from error
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def read_target(target: Any, batch: TextBatch) -> TargetOutputs:
    """Run the target over whole blocks (teacher forcing), without its vocabulary-wide layer.

    No mask is given: attention is causal, padding comes last, and the positions, which start
    anew in each row, keep packed rows apart.

    Args:
        target: a transformers causal language model.
        batch: the blocks.
    """
    outputs = target.base_model(
        input_ids=batch.tokens, position_ids=batch.positions, use_cache=False
    )
    embedded = target.get_input_embeddings()(batch.tokens)
    return TargetOutputs(outputs.last_hidden_state, embedded)


class TargetHead:
    """From hidden states to logits, as the target itself does it, for any part of the positions.

    Args:
        target: a transformers causal language model.

    Raises:
        ConfigError: the target computes its logits in another way, which a comparison on a few
            tokens shows.
    """

    def __init__(self, target: Any) -> None:
        config = target.config.get_text_config()
        self.layer = target.get_output_embeddings()
        self.soft_cap = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies, Granite divides.
        self.scale = getattr(config, "logit_scale", None) or 1.0
        self.scale /= getattr(config, "logits_scaling", None) or 1.0
        self._check(target)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H]."""
        logits: Tensor = self.layer(hidden.to(self.layer.weight.dtype)) * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits

    @torch.no_grad()
    def _check(self, target: Any) -> None:
        device = target.get_input_embeddings().weight.device
        tokens = torch.arange(8, device=device).unsqueeze(0)
        hidden = target.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        ours, own = self(hidden).float(), target(input_ids=tokens, use_cache=False).logits.float()
        if not torch.allclose(ours, own, rtol=1e-2, atol=1e-2 * float(own.abs().max())):
            raise ConfigError(
                f"target {target.config.name_or_path!r}: its logits are not those of its output "
                "layer, soft cap and scale; its distribution cannot be distilled in chunks: "
                "use --loss ce, or data with --top-logprobs and --teacher data"
            )
