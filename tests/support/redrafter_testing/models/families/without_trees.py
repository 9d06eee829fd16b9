# SPDX-License-Identifier: Apache-2.0
"""Families of targets that verify no trees, and what is said of them before any process starts.

They show in their configuration what they are, so no weights are made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

VOCAB, HIDDEN = 512, 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MLA = {
    **SIZES,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
STATE = "its Mamba or linear-attention layers keep a state that no tree can share"
LATENT = r"its attention is multi-head latent attention \(MLA\)"
REFUSED_ON_CPUS = {
    STATE: "on vLLM's CPU backend recurrent layers verify no drafts",
    LATENT: r"on vLLM's CPU backend multi-head latent attention \(MLA\) verifies no drafts",
}
"""By why a target verifies chains elsewhere."""
CHUNKS = "its attention is local to chunks of 32 tokens"


@dataclass(frozen=True)
class FamilyWithoutTrees:
    """Targets of one class that neither engine verifies trees on.

    Attributes:
        architecture: the class's name in vLLM; docs/compatibility.md has a row with it.
        model_type: as transformers calls it.
        message: a pattern of why.
        sizes: of the configuration.
    """

    architecture: str
    model_type: str
    message: str
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)

    def make(self, folder: Path) -> Path:
        """Write its configuration."""
        config = AutoConfig.for_model(self.model_type, **self.sizes)
        config.architectures = [self.architecture]
        config.save_pretrained(folder)
        return folder


def _text(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"text_config": dict(sizes)}


CHUNKED = {**SIZES, "attention_chunk_size": 32}
SPEECH = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "decoder_start")},
}

CHAINED = (
    FamilyWithoutTrees("DeepseekV3ForCausalLM", "deepseek_v3", LATENT, MLA),
    FamilyWithoutTrees("Glm4MoeLiteForCausalLM", "glm4_moe_lite", LATENT, MLA),
    FamilyWithoutTrees("Qwen3NextForCausalLM", "qwen3_next", STATE),
    FamilyWithoutTrees("Qwen3_5ForConditionalGeneration", "qwen3_5", STATE, _text(SIZES)),
    FamilyWithoutTrees("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", STATE, _text(SIZES)),
    FamilyWithoutTrees("NemotronHForCausalLM", "nemotron_h", STATE),
    FamilyWithoutTrees("GraniteMoeHybridForCausalLM", "granitemoehybrid", STATE),
    FamilyWithoutTrees("JambaForCausalLM", "jamba", STATE),
    FamilyWithoutTrees("FalconH1ForCausalLM", "falcon_h1", STATE),
    FamilyWithoutTrees(
        "Lfm2ForCausalLM",
        "lfm2",
        STATE,
        {**SIZES, "layer_types": ["conv", "full_attention"] * 2},
    ),
    FamilyWithoutTrees("Llama4ForCausalLM", "llama4_text", CHUNKS, CHUNKED),
    FamilyWithoutTrees("Llama4ForConditionalGeneration", "llama4", CHUNKS, _text(CHUNKED)),
)
REFUSED = (
    FamilyWithoutTrees("WhisperForConditionalGeneration", "whisper", "encoder-decoder", SPEECH),
    FamilyWithoutTrees(
        "MambaForCausalLM",
        "mamba",
        r"models without attention \(Mamba alone\)",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "state_size": 16, "num_hidden_layers": 2},
    ),
)
