# SPDX-License-Identifier: Apache-2.0
"""Targets that verify no trees, known by their configuration alone; chained.py has weights, too."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from transformers import AutoConfig

from redrafter_testing.models.families import family

VOCAB, HIDDEN = 512, 128
SIZES: dict[str, Any] = {
    **family.SIZES,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEXT = {"text_config": SIZES}
MLA = {
    **SIZES,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
CHUNKED = {"text_config": {**SIZES, "attention_chunk_size": 32}}
SPEECH = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "decoder_start")},
}
STATE = "its Mamba or linear-attention layers keep a state that no tree can share"
LATENT = r"its attention is multi-head latent attention \(MLA\)"
REFUSED_ON_CPUS = {
    STATE: "on vLLM's CPU backend recurrent layers verify no drafts",
    LATENT: r"on vLLM's CPU backend multi-head latent attention \(MLA\) verifies no drafts",
}
"""By why a target verifies chains elsewhere."""


class FamilyWithoutTrees(NamedTuple):
    """A class that neither engine verifies trees on, in transformers, and a pattern of why."""

    architecture: str
    model_type: str
    message: str
    sizes: Mapping[str, Any] = SIZES

    def make(self, folder: Path) -> Path:
        """Write its configuration."""
        config = AutoConfig.for_model(self.model_type, **deepcopy(dict(self.sizes)))
        config.architectures = [self.architecture]
        config.save_pretrained(folder)
        return folder


CHAINS_ALONE = (
    FamilyWithoutTrees("Glm4MoeLiteForCausalLM", "glm4_moe_lite", LATENT, MLA),
    FamilyWithoutTrees("Qwen3_5ForConditionalGeneration", "qwen3_5", STATE, TEXT),
    FamilyWithoutTrees("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", STATE, TEXT),
    FamilyWithoutTrees("NemotronHForCausalLM", "nemotron_h", STATE),
    FamilyWithoutTrees("JambaForCausalLM", "jamba", STATE),
    FamilyWithoutTrees("FalconH1ForCausalLM", "falcon_h1", STATE),
    FamilyWithoutTrees(
        "Llama4ForConditionalGeneration",
        "llama4",
        "its attention is local to chunks of 32 tokens",
        CHUNKED,
    ),
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


def start_messages(llm: Any, targets: Sequence[Path], drafter: Path) -> list[str]:
    """For `Engine.call`: why each target is refused, or why it verifies chains; "" for trees."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_redrafter import ConfigError, plugin
    from vllm_redrafter.engine.chains import ANNOUNCEMENT

    said: list[str] = []
    messages = []

    def info(text: str, *given: Any) -> None:
        said.extend([text % given] * (text == ANNOUNCEMENT))

    plugin._logger = lambda: SimpleNamespace(info=info)
    for target in targets:
        said.clear()
        speculative = {"model": str(drafter), "num_speculative_tokens": 8}
        arguments = EngineArgs(
            str(target), skip_tokenizer_init=True, speculative_config=speculative
        )
        try:
            arguments.create_engine_config()
            messages.append("".join(said))
        except ConfigError as error:
            messages.append(str(error))
    return messages
