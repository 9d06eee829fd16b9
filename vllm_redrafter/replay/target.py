# SPDX-License-Identifier: Apache-2.0
"""The frozen target in transformers: hidden states, embeddings, logits.

Its ends (input embedding, final norm, output layer) are enough where hidden states were captured.
They are a target too: one of no layers.
"""

import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.utils import logging

from vllm_redrafter.data.target import Target
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.utils.errors import ConfigError, one_line


@dataclass(frozen=True)
class TargetOutputs:
    """The target's outputs for a batch of B blocks of T tokens.

    Attributes:
        hidden: [B, T, (1 + n) H], see `hidden_states`.
        embedded: [B, T, H], the input embedding of each token.
    """

    hidden: Tensor
    embedded: Tensor

    @property
    def last(self) -> Tensor:
        """[B, T, H], the last hidden state after the final norm: what lm_head reads."""
        return self.hidden[..., : self.embedded.shape[-1]]


def model_factory(config: Any) -> Any:
    """transformers' class that makes the model of a configuration, which may see images."""
    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def load_target(
    target: Target, dtype: torch.dtype | str = torch.float32, device: torch.device | str = "cpu"
) -> Any:
    """Load a causal language model, frozen and in eval mode; ConfigError where that cannot be.

    The dtype "auto" is the checkpoint's own, the device "auto" accelerate's device map.
    """
    device_map = "auto" if device == "auto" else None
    name, factory = target.name, model_factory(target.config)
    path = os.path.expanduser(name)
    try:
        model = factory.from_pretrained(path, dtype=dtype, device_map=device_map)
    except ImportError as error:  # of a package that a format needs
        if getattr(target.config, "quantization_config", None) is None:
            raise
        raise _not_run(name, error) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target {name!r}: transformers cannot load it as a causal language model; "
            f"give a folder in Hugging Face format, or a hub id: {error}"
        ) from error
    if device_map is None:
        model = model.to(device)
    model = model.eval().requires_grad_(False)
    if getattr(model.config, "quantization_config", None) is not None:
        _check_runs(model, name)
    return model


@torch.no_grad()
def _check_runs(model: Any, name: str) -> None:
    # Packed weights may load where nothing multiplies them; compressed-tensors unpacks its own
    # when the whole model is called, and not before.
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    except Exception as error:  # each format has its own: AttributeError, RuntimeError, ...
        raise _not_run(name, error) from error


def _not_run(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"target {name!r} is quantised, and transformers cannot run it here "
        f"({one_line(error)}): give the model that it was made of, with --other-target"
    )


def load_ends(
    target: Target, dtype: torch.dtype | str = torch.float32, device: torch.device | str = "cpu"
) -> Any:
    """Load a target without its layers, which are not read either; ConfigError as for the whole."""
    name, config = target.name, deepcopy(target.config)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"target {name!r} is quantised, and its ends alone cannot be taken from packed "
            "weights: give the model that it was made of, with --other-target"
        )
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # It would report each tensor of the layers as unexpected.
    try:
        model, report = model_factory(config).from_pretrained(
            os.path.expanduser(name),
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target {name!r}: transformers cannot load its embedding, final norm and output "
            f"layer from safetensors: {error}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"target {name!r}: its safetensors lack {', '.join(missing)}")
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def final_norm(target: Any) -> Callable[[Tensor], Tensor]:
    """The target's final norm, found in what `load_ends` returns; ConfigError where it has none."""
    outputs: list[tuple[nn.Module, Any]] = []
    hooks = [
        module.register_forward_hook(lambda module, _, output: outputs.append((module, output)))
        for module in target.base_model.modules()
        if not list(module.children())
    ]
    try:
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
        last = target.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    for module, output in outputs:
        if output is last:
            return module
    raise ConfigError(
        f"target {target.config.name_or_path!r}: what it does behind its last layer is no module "
        "of its own, and cannot be done to captured hidden states; train without --hidden-states"
    )


@torch.no_grad()
def read_target(target: Any, batch: TextBatch, layers: Sequence[int] = ()) -> TargetOutputs:
    """Run the target over whole blocks (teacher forcing), without its vocabulary-wide layer.

    No mask is given: attention is causal, padding comes last, and the positions, which start
    anew in each row, keep packed rows apart. Where they do not, as a recurrent state goes on from
    row to row, each row is read by itself. For a batch with hidden states, those of the same
    `layers`, the target's ends are enough.
    """
    embedded = target.get_input_embeddings()(batch.tokens)
    if batch.hidden is not None:
        return TargetOutputs(batch.hidden, embedded)
    if (batch.positions[:, 1:] == 0).any() and not keeps_rows_apart(target):
        return TargetOutputs(_read_apart(target, batch, layers), embedded)
    hidden = hidden_states(target, layers, input_ids=batch.tokens, position_ids=batch.positions)
    return TargetOutputs(hidden, embedded)


_KEEPS_ROWS_APART: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@torch.no_grad()
def keeps_rows_apart(target: Any) -> bool:
    """Does a row's hidden state not depend on the row before it in its block? Asked once."""
    if target not in _KEEPS_ROWS_APART:
        tokens = torch.arange(1, 9, device=target.get_input_embeddings().weight.device)
        positions = torch.arange(4, device=tokens.device).repeat(2)
        inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
        packed = hidden_states(target, (), **inputs)
        alone = hidden_states(target, (), **{name: x[:, 4:] for name, x in inputs.items()})
        error = (packed[0, 4:] - alone[0]).abs().max()
        _KEEPS_ROWS_APART[target] = bool(error < 1e-2 * alone.abs().max())
    return _KEEPS_ROWS_APART[target]


def _read_apart(target: Any, batch: TextBatch, layers: Sequence[int]) -> Tensor:
    """[B, T, (1 + n) H] of rows read one by one; padding goes with the row before it."""
    positions = batch.positions
    begins = (positions == 0) & (positions.roll(-1, dims=1) == 1)
    begins[:, 0] = True
    first = begins.flatten().nonzero().squeeze(1)
    lengths = torch.diff(first, append=first.new_tensor([begins.numel()])).tolist()
    tokens = pad_sequence(list(torch.split(batch.tokens.flatten(), lengths)), batch_first=True)
    at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    hidden = hidden_states(target, layers, input_ids=tokens, position_ids=at)
    parts = [row[:length] for row, length in zip(hidden, lengths, strict=True)]
    return torch.cat(parts).view(*positions.shape, -1)


@torch.no_grad()
def hidden_states(target: Any, layers: Sequence[int], **inputs: Tensor) -> Tensor:
    """[B, T, (1 + n) H]: the last hidden state after the final norm, then those of n layers.

    Layers are in ascending order; ConfigError where the target's class does not return them.
    """
    text = target.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope and "position_ids" in inputs:
        # Text's own first, which alone keep packed rows apart; then time, height and width.
        inputs["position_ids"] = inputs["position_ids"].expand(4, -1, -1)
    if not layers:
        last: Tensor = target.base_model(**inputs, use_cache=False).last_hidden_state
        return last
    outputs = target.base_model(**inputs, use_cache=False, output_hidden_states=True)
    num_layers = text.num_hidden_layers
    if len(states := outputs.hidden_states or ()) != num_layers + 1:
        raise ConfigError(
            f"target {target.config.name_or_path!r}: transformers gives {len(states)} hidden "
            f"states of its {num_layers} layers where {num_layers + 1} are expected: train "
            "with --target-layers none"
        )
    last = outputs.last_hidden_state
    return torch.cat([last, *(states[layer].to(last.device) for layer in layers)], dim=-1)


class TargetHead:
    """The target's logits of hidden states; ConfigError where a few tokens give others."""

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
                "use --kl-weight 0"
            )
