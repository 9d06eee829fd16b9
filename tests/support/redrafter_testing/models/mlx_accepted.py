# SPDX-License-Identifier: Apache-2.0
"""Which models of mlx-lm verify trees: what tests/mlx shows, and docs/mlx-models.md says."""

ACCEPTED = str.split("""
    Klear afmoe apertus bailing_moe cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3
    dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe gear gemma gemma2 gemma3
    gemma3_text gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt_oss
    gptj granite granitemoe helium hunyuan hunyuan_v1_dense internlm2 internlm3
    kimi_k25 kimi_vl laguna llama llama4_text mellum mimo
    mimo_v2_flash minicpm minicpm3 minimax mistral3 mixtral muse_glimmer nanbeige nemotron
    nemotron-nas olmo2 olmo3 olmoe openelm phi phi3 phimoe pixtral qwen qwen2 qwen2_moe
    qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open spark2_5
    stablelm starcoder2 step3p5 telechat3 youtu_llm
""")

REFUSED = {
    "recurrent or convolutional layers (`ArraysCache`)": str.split("""
        bailing_hybrid bailing_moe_linear bailing_moe_v3 granitemoehybrid jamba kimi_k3
        kimi_linear lfm2 lfm2-vl lfm2_moe longcat_flash_ngram mamba mamba2 nemotron_h
        olmo_hybrid plamo2 qwen3_5 qwen3_5_moe qwen3_next recurrent_gemma rwkv7
    """),
    "several caches in one layer (`CacheList`)": str.split("""
        baichuan_m1 deepseek_v32 falcon_h1 glm_moe_dsa longcat_flash minimax_m3_vl
    """),
    "caches of its own (`LayerCache`)": ["deepseek_v41"],
    "attention within chunks of the context (`ChunkedKVCache`)": ["llama4"],
    "attention to blocks of rows (`block_sparse`)": ["phi3small"],
    "positions applied outside of a rope module": str.split("""
        gpt2 gpt_bigcode ministral3 mistral4 nanochat talkie
    """),
    "several hidden states for a token": ["gemma3n"],
    "the output layer in the module with the layers": ["gpt_neox", "lille-130m"],
    "layers that are not called as modules": ["iquestloopcoder"],
    "a final norm outside of the module with the layers": ["phixtral", "plamo3"],
    "positions that are counted by rows in layers that share K and V": ["afm7"],
    "no module that returns what all layers make of a token": ["plamo"],
}
"""By the reason."""

NOT_TRIED = {
    "has kernels for Metal alone": ["bitnet", "muse_spark"],
    "needs the package ai2-olmo": ["olmo"],
    "needs weights in its own packing": ["prism_hadamard_qwen35"],
}
"""By the reason why the tests have no tiny one."""
