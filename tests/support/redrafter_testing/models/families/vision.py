# SPDX-License-Identifier: Apache-2.0
"""Targets that see images: a token of an image has several positions (M-RoPE)."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image

from redrafter_testing.models.families.family import SIZES, Family, Questions, word_tokenizer
from redrafter_testing.models.tiny_models import make_random_target
from redrafter_testing.requests.answers import single_tokens_of

WORDS = [f"w{i}" for i in range(18)]
QWEN = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}
"""Special tokens by their names in the configuration; an image is the first three."""
GLM = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_token_id": "<|image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_token_id": "<|video|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
NUM_KNOWN = 2 + len(WORDS)
HIDDEN, VOCAB = 128, NUM_KNOWN + len(GLM)
PATCH = 4
"""Pixels; a token stands for 2 x 2 patches, so an image of 48 x 48 is 36 tokens."""

TEXT: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "max_position_embeddings": 1024,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "patch_size": PATCH,
    "out_hidden_size": HIDDEN,
    "initializer_range": 0.3,
}


@dataclass(frozen=True)
class Looking(Questions):
    """Questions about images, which are black where blank; `mark` stands for one in a prompt."""

    mark: str = ""
    blank: bool = False

    def run(self, llm: Any) -> list[list[int]]:
        """The answers' tokens; then those to the same texts and images with another end."""
        tokens = []
        for end in WORDS[:2]:
            prompts = [self._prompt(i, end) for i in range(self.count)]
            tokens += single_tokens_of(llm.generate(prompts, self.params(), use_tqdm=False))
        return tokens

    def _prompt(self, i: int, end: str) -> dict[str, Any]:
        """An image; text alone; several images; more than a step reads, an image in its midst."""
        length, at, count = ((40, 3, 1), (9, 0, 0), (7, 2, 3), (110, 80, 1))[i % 4]
        text = [WORDS[(j * j + i) % len(WORDS)] for j in range(length + i)]
        images = [self._image(16 + 8 * (i % 5), 40 - 8 * n) for n in range(count)]
        words = [*text[:at], *[self.mark] * count, *text[at:], end]
        return {"prompt": " ".join(words), "multi_modal_data": {"image": images}}

    def _image(self, height: int, width: int) -> Image.Image:
        rows, columns = np.mgrid[:height, :width]
        pixels = np.stack([rows * 9, columns * 7, rows * columns], axis=-1) % 256
        return Image.fromarray((pixels * (not self.blank)).astype(np.uint8))


def make_vision_target(
    config: Any, special: dict[str, str], processors: tuple[str, str], folder: Path
) -> Path:
    """Random weights, a tokenizer (`special`: its tokens behind WORDS) and a processor."""
    make_random_target(config, folder)
    tokenizer = word_tokenizer(["<s>", "</s>", *WORDS])
    tokenizer.add_special_tokens({"additional_special_tokens": list(special.values())})
    tokenizer.save_pretrained(folder)
    processor = {
        "processor_class": processors[0],
        "image_processor_type": processors[1],
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 8 * 8, "longest_edge": 48 * 48},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _family(
    architecture: str,
    config: type[Any],
    special: dict[str, str],
    processors: tuple[str, str],
    text: dict[str, Any],
    vision: dict[str, Any],
    feature: str,
) -> Family:
    ids = {name: NUM_KNOWN + i for i, name in enumerate(special)}
    made = config(text_config={**TEXT, **text}, vision_config={**VISION, **vision}, **ids)
    mark = " ".join(list(special.values())[:3])
    return Family(
        architecture,
        partial(make_vision_target, made, special, processors),
        feature,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        questions=partial(Looking, mark=mark),
        blank=partial(Looking, mark=mark, blank=True),
        batched_tokens=96,
        arguments={"max_model_len": 256, "limit_mm_per_prompt": {"image": 3, "video": 0}},
    )


def _sections(*sections: int, **rest: Any) -> dict[str, Any]:
    """How many of half a head's dimensions turn by time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"rope_parameters": {**rope, **rest}}


QWEN2_5_VL = _family(
    "Qwen2_5_VLForConditionalGeneration",
    transformers.Qwen2_5_VLConfig,
    QWEN,
    ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor"),
    _sections(8, 12, 12),
    {"fullatt_block_indexes": [1], "window_size": 16},
    "M-RoPE in sections",
)
QWEN3_VL = _family(
    "Qwen3VLForConditionalGeneration",
    transformers.Qwen3VLConfig,
    QWEN,
    ("Qwen3VLProcessor", "Qwen2VLImageProcessor"),
    _sections(12, 10, 10, mrope_interleaved=True),
    {"deepstack_visual_indexes": [0], "num_position_embeddings": 36},
    "interleaved M-RoPE, an image in two layers' inputs",
)
GLM4V = _family(
    "Glm4vForConditionalGeneration",
    transformers.Glm4vConfig,
    GLM,
    ("Glm4vProcessor", "Glm4vImageProcessor"),
    _sections(4, 6, 6, partial_rotary_factor=0.5),
    {"image_size": 48},
    "M-RoPE of half of each head",
)
VISUAL = (QWEN2_5_VL, QWEN3_VL, GLM4V)
