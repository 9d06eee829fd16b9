# SPDX-License-Identifier: Apache-2.0
"""Classes of mlx-lm that trees are shown to work with, or that are refused: one for each form."""

ACCEPTED = str.split("""
    cohere2 deepseek_v2 deepseek_v3 exaone4 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text
    glm4 gpt_oss granite llama llama4_text mimo_v2_flash minicpm3 mistral3 mixtral nemotron-nas
    olmo2 openelm phi3 qwen qwen2 qwen3 qwen3_moe stablelm starcoder2 step3p5
""")

REFUSED = {
    "recurrent or convolutional layers (`ArraysCache`)": ["mamba", "qwen3_next", "lfm2"],
    "several caches in one layer (`CacheList`)": ["falcon_h1", "deepseek_v32"],
    "caches of its own (`LayerCache`)": ["deepseek_v41"],
    "attention within chunks of the context (`ChunkedKVCache`)": ["llama4"],
    "attention to blocks of rows (`block_sparse`)": ["phi3small"],
    "positions applied outside of a rope module": ["gpt2"],
    "several hidden states for a token": ["gemma3n"],
    "the output layer in the module with the layers": ["gpt_neox"],
    "layers that are not called as modules": ["iquestloopcoder"],
    "a final norm outside of the module with the layers": ["phixtral"],
    "positions that are counted by rows in layers that share K and V": ["afm7"],
    "no module that returns what all layers make of a token": ["plamo"],
}
"""By the reason."""
