# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and Gemma 4: of text, and Gemma 3 with images, whose tokens see one another."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from redrafter_testing.models.families.family import (
    SIZES,
    Family,
    Questions,
    random_family,
    rename_weights,
    word_tokenizer,
)

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = {**SIZES, "layer_types": [SLIDING, FULL], "sliding_window": 32}
GEMMA3 = {**WINDOWS, "query_pre_attn_scalar": 64}
GEMMA4 = {**WINDOWS, "head_dim": 256, "global_head_dim": 512}
EFFICIENT = {
    **GEMMA4,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, FULL],
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
}
EXPERTS = {
    **GEMMA4,
    "hidden_size_per_layer_input": 0,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}

WORDS = 4
NEWLINES = ["\n" * count for count in range(1, 5)]
"""Gemma's tokenizer has a token for each."""
SIGNS = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
IMAGE_TOKENS = 16


def make_seeing_gemma3(folder: Path) -> Path:
    """Random weights, a tokenizer and a processor: images of 16 x 16, a token for 4 x 4 of them."""
    tokenizer = _tokenizer()
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "initializer_range": 0.3,
    }
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**{**GEMMA3, "vocab_size": len(tokenizer)}),
        vision_config=vision,
        mm_tokens_per_image=IMAGE_TOKENS,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    torch.manual_seed(5)
    model = transformers.Gemma3ForConditionalGeneration(config).float()
    for name, parameter in model.named_parameters():
        if "language_model" in name and ".post_" in name:
            torch.nn.init.constant_(parameter, 15.0)
        if "q_norm" in name:
            # Else answers hardly depend on what an image's tokens see.
            torch.nn.init.constant_(parameter, 4.0)
        if "vision_tower" in name or "projection" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    rename_weights(folder, "vision_tower.", "vision_tower.vision_model.")
    images = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=IMAGE_TOKENS)
    processor.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    names = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    return word_tokenizer(names, NEWLINES, extra_special_tokens=SIGNS)


@dataclass(frozen=True)
class Seeing(Questions):
    """Requests with no image, with one, and with two."""

    def prompt(self, i: int) -> dict[str, Any]:
        rng, pixels = random.Random(i), np.random.default_rng(i)
        words = [f"w{rng.randrange(WORDS)}" for _ in range(4 + 5 * i)]
        count = i % 3
        pictures = [
            Image.fromarray(pixels.integers(0, 256, (16, 16, 3), dtype=np.uint8))
            for _ in range(count)
        ]
        text = " ".join(["w1", *[SIGNS["boi_token"], "w2"] * count, *words])
        return {"prompt": text, "multi_modal_data": {"image": pictures}}


GEMMA = (
    random_family(
        "Gemma3ForCausalLM",
        transformers.Gemma3TextConfig(**GEMMA3),
        "a sliding window in every other layer",
    ),
    Family(
        "Gemma3ForConditionalGeneration",
        make_seeing_gemma3,
        "images, whose tokens see one another (PrefixLM)",
        vocab_size=len(_tokenizer()),
        questions=Seeing,
        arguments={
            "skip_tokenizer_init": False,
            "disable_chunked_mm_input": True,  # as vLLM has it on a GPU
            "limit_mm_per_prompt": {"image": 2},
        },
        is_prefix_lm=True,
    ),
    random_family(
        "Gemma4ForCausalLM",
        transformers.Gemma4TextConfig(**EFFICIENT),
        "heads of 256 and 512, K and V shared by layers, embeddings of each layer",
    ),
    random_family(
        "Gemma4ForCausalLM",
        transformers.Gemma4TextConfig(**EXPERTS),
        "experts, K for V in every other layer",
    ),
)
