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
    families,
    random_family,
    rename_weights,
    word_tokenizer,
)

GEMMA3 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 32,
    "query_pre_attn_scalar": 64,
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
        text_config=transformers.Gemma3TextConfig(
            **{**SIZES, **GEMMA3, "vocab_size": len(tokenizer)}
        ),
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
        "Gemma3ForCausalLM", "Gemma3TextConfig", "a sliding window in every other layer", GEMMA3
    ),
    Family(
        "Gemma3ForConditionalGeneration",
        make_seeing_gemma3,
        "images, whose tokens see one another (PrefixLM)",
        vocab_size=len(_tokenizer()),
        questions=Seeing,
        arguments={
            "disable_chunked_mm_input": True,  # as vLLM has it on a GPU
            "limit_mm_per_prompt": {"image": 2},
        },
        is_prefix_lm=True,
    ),
    *families("gemma4"),
)
