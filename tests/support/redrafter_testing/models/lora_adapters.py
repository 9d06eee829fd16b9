# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters for a small Llama, and requests of which two in three use one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

RANK = 8
# One more than there are adapters: on a CPU, vLLM 0.32 gives requests without one the last place's.
ARGUMENTS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}


def make_adapter(folder: Path, target: Path, seed: int) -> Path:
    """Of some of the target's layers, the output's too; large enough to change its output."""
    config = json.loads((target / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (config["num_attention_heads"] * config["head_dim"], hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    layers["lm_head"] = (config["vocab_size"], hidden)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in layers.items():
        for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
            values = 0.2 * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{name}.{part}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "base_model_name_or_path": str(target),
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


@dataclass(frozen=True)
class Adapted:
    """`few_tokens.requests`: request i uses adapter i % 3 - 1, or none where that is -1."""

    adapters: tuple[Path, Path]
    count: int
    sampling: str = "greedy"

    def run(self, llm: Any) -> list[list[int]]:
        load = few_tokens.requests(self.sampling, self.count)
        uses = [
            LoRARequest(f"adapter {i % 3}", i % 3, str(self.adapters[i % 3 - 1])) if i % 3 else None
            for i in range(self.count)
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in load.prompts]
        answers = llm.generate(prompts, load.params, use_tqdm=False, lora_request=uses)
        return single_tokens_of(answers)
