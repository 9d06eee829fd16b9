# SPDX-License-Identifier: Apache-2.0
"""Drafters that vLLM serves, small and random, and what each drafts after a text, by torch alone.

EAGLE heads are as vLLM's `llama_eagle.py` and `llama_eagle3.py` compute them, an MTP layer as
`exaone_moe_mtp.py` does, whose own layer is a Llama's with norms of q and k.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

AUX_LAYERS = [0, 1]


def add_mtp_layer(target: Path) -> None:
    """Of its own, as Qwen3-Next names it or DeepSeek: its last layer, of the sum of its inputs."""
    weights, last = load_file(target / "model.safetensors"), "model.layers.1."
    of_target = weights["model.norm.weight"]
    start, layer, joins = "model.layers.2.", "", "eh_proj"
    norms = ["enorm", "hnorm", "shared_head.norm"]
    if "model.layers.0.linear_attn.A_log" in weights:
        start, layer, joins = "mtp.", "layers.0.", "fc"
        norms = ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
    added = {name.replace(last, layer): w for name, w in weights.items() if name.startswith(last)}
    added |= {f"{name}.weight": of_target for name in norms}
    added[f"{joins}.weight"] = torch.eye(len(of_target)).to(of_target).repeat(1, 2)
    weights |= {start + name: tensor.clone() for name, tensor in added.items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


class Head(nn.Module):
    """Of a Llama; its parameters' names are a checkpoint's."""

    def __init__(self, target: Any, method: str) -> None:
        super().__init__()
        config, self.is_third = target.config, method == "eagle3"
        self.__dict__["target"] = target  # not a part of it
        size, layer = config.hidden_size, LlamaDecoderLayer(config, 0)
        self.fc = nn.Linear(2 * size, size, bias=False)
        if self.is_third:
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = getattr(layer.self_attn, name).out_features
                setattr(layer.self_attn, name, nn.Linear(2 * size, rows, bias=False))
            self.midlayer, self.norm = layer, LlamaRMSNorm(size)
            layer.hidden_norm = LlamaRMSNorm(size)
            self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
            return
        self.layers, norm = nn.ModuleList([layer]), nn.Identity
        if method == "mtp":
            layer.self_attn, norm = Qwen3Attention(config, 0), partial(LlamaRMSNorm, size)
        else:
            layer.input_layernorm = nn.Identity()
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm(), norm()

    def states_of(self, ids: Tensor) -> Tensor:
        """[T, H] that it reads of the target."""
        read = self.target.model(ids[None], output_hidden_states=True)
        if not self.is_third:
            return read.last_hidden_state[0]
        return self.fc(torch.cat([read.hidden_states[i][0] for i in AUX_LAYERS], dim=-1))

    def forward(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and states [T, H] after tokens [T] with the states before them."""
        target, embedded = self.target, self.target.model.embed_tokens(ids)
        if self.is_third:
            layer, residual = self.midlayer, hidden
            x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1)
        else:
            layer = self.layers[0]
            parts = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
            residual = self.fc(torch.cat(parts, dim=-1))
            x = layer.input_layernorm(residual)
        angles = target.model.rotary_emb(x[None], torch.arange(len(ids))[None])
        attended, _ = layer.self_attn(x[None], position_embeddings=angles, attention_mask=None)
        residual = residual + attended[0]
        after = residual + layer.mlp(layer.post_attention_layernorm(residual))
        normed = self.norm(after)
        return (self.lm_head(normed), after) if self.is_third else (target.lm_head(normed), normed)


class Drafter:
    """Written to a folder; drafts after a text that it reads afresh."""

    def __init__(self, method: str, target: Path, folder: Path, seed: int = 3) -> None:
        """A draft model is the target with noise in its weights, right now and then."""
        torch.manual_seed(seed)
        self.method, self.target, self.folder = method, target, folder
        self.model = AutoModelForCausalLM.from_pretrained(target).eval()
        self.head: Head | None = None
        if method == "draft_model":
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.data += 0.2 * parameter.std() * torch.randn_like(parameter)
            self.model.save_pretrained(folder)
            return
        self.head = Head(self.model, method).eval()
        for name, parameter in self.head.named_parameters():
            if parameter.dim() > 1 and name != "fc.weight":
                parameter.data *= 6
        weights = self.head.state_dict()
        config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
        config["architectures"] = ["LlamaForCausalLM"]
        if method == "mtp":
            config |= {"architectures": ["ExaoneMoeForCausalLM"], "model_type": "exaone_moe"}
            weights = {f"mtp.{name}": tensor for name, tensor in weights.items()}
            weights |= self.model.state_dict()
        save_file(weights, folder / "model.safetensors")
        if self.head.is_third:
            config |= {
                "architectures": ["LlamaForCausalLMEagle3"],
                "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
                "num_aux_hidden_states": len(AUX_LAYERS),
                "draft_vocab_size": config["vocab_size"],
            }
        (folder / "config.json").write_text(json.dumps(config))

    @torch.inference_mode()
    def __call__(self, text: list[int], length: int) -> list[int]:
        ids = torch.tensor(text)
        hidden = None if self.head is None else self.head.states_of(ids[:-1])
        for _ in range(length):
            if self.head is None:
                logits = self.model(ids[None]).logits[0]
            else:
                logits, after = self.head(ids[1:], hidden)
                hidden = torch.cat([hidden, after[-1:]])
            ids = torch.cat([ids, logits[-1:].argmax(-1)])
        return ids[len(text) :].tolist()
