# SPDX-License-Identifier: Apache-2.0
"""Qwen2-Audio: positions are one per token; so few tokens that a random drafter is often right."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from redrafter_testing.models.families.family import (
    SIZES,
    Family,
    Questions,
    rename_weights,
    word_tokenizer,
)

HIDDEN = 128
WORDS = 18
SPECIAL = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
VOCAB = WORDS + 3 + len(SPECIAL)


def make_audio_target(folder: Path) -> Path:
    """Random weights, a tokenizer and a processor."""
    names = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    tokenizer = word_tokenizer(names)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=30)
    Qwen2AudioProcessor(extractor, tokenizer).save_pretrained(folder)

    text = {
        **SIZES,
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "initializer_range": 0.2,
    }
    audio = {
        "model_type": "qwen2_audio_encoder",
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 1500,
    }
    torch.manual_seed(0)
    config = Qwen2AudioConfig(
        audio_config=audio,
        text_config=text,
        audio_token_index=tokenizer.convert_tokens_to_ids(SPECIAL[0]),
        initializer_range=0.2,
    )
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    rename_weights(folder, "language_model.model.model.", "language_model.model.")
    return folder


@dataclass(frozen=True)
class Listening(Questions):
    """Questions about sounds (silence where blank), and some without one."""

    blank: bool = False

    def prompt(self, i: int) -> dict[str, Any]:
        text = " ".join(f"w{(j * j + i) % WORDS}" for j in range(4 + 5 * i))
        if i % 3 == 0:
            return {"prompt": text}
        wave = np.sin(np.arange(4000 + 1500 * i) * (0.01 + 0.02 * i)).astype(np.float32)
        sound = np.zeros_like(wave) if self.blank else wave
        return {
            "prompt": f"w3 <|audio_bos|><|AUDIO|><|audio_eos|> {text}",
            "multi_modal_data": {"audio": (sound, 16000)},
        }


AUDIO = (
    Family(
        "Qwen2AudioForConditionalGeneration",
        make_audio_target,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        questions=Listening,
        blank=partial(Listening, blank=True),
        batched_tokens=96,
        arguments={"limit_mm_per_prompt": {"audio": 1}},
    ),
)
