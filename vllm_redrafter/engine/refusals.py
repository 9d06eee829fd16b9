# SPDX-License-Identifier: Apache-2.0
"""What neither engine can run; each has a list of its own besides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

REMEDY_DISABLE = "leave the speculative config out to run it"
"""The remedy where the target itself is the obstacle."""

REMEDY_CHAIN = 'or verify chains, with "tree": "chain" in the speculative config'
"""Another, where what the user has asked for stands only against trees."""


def common_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    """Why no engine of ours can run this configuration: what it is, and what to do."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.runner_type == "pooling":
        yield "it is a pooling model, which does not generate; leave the speculative config out"
    if model.is_encoder_decoder:
        yield f"encoder-decoder models are not supported; {REMEDY_DISABLE}"
    if model.is_attention_free:
        yield f"models without attention (Mamba alone) are not supported; {REMEDY_DISABLE}"
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        yield "KV-sharing fast prefill is not supported; leave --kv-sharing-fast-prefill out"
    if parallel.use_ray or parallel.data_parallel_backend == "ray":
        yield from _refusals_of_ray()
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            yield f"{name} is {size}, it must be 1"


def _refusals_of_ray() -> Iterator[str]:
    from vllm import envs
    from vllm.platforms import current_platform

    if not current_platform.ray_device_key:
        yield (
            f"vLLM has no workers of Ray on its {current_platform.device_name} platform; leave "
            "--distributed-executor-backend and --data-parallel-backend out, for several machines "
            "too (--nnodes)"
        )
    # vLLM 0.33 has no other executor, nor this variable.
    if not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True):
        yield (
            "vLLM's older executor for Ray calls the model runner past our worker; unset "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
        )
