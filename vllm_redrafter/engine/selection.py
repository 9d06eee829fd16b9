# SPDX-License-Identifier: Apache-2.0
"""Which engine runs on this platform, and what vLLM's configuration calls its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_redrafter.engine.chains import chain_reasons
from vllm_redrafter.engine.cpu.v1 import refusals as cpu
from vllm_redrafter.engine.v2 import refusals as v2
from vllm_redrafter.engine.v2 import schedule
from vllm_redrafter.engine.vllm_interface import check_vllm
from vllm_redrafter.utils import names
from vllm_redrafter.utils.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


@dataclass(frozen=True)
class Engine:
    """One of our adapters to vLLM.

    Attributes:
        worker: path of the worker class.
        proposer: path of the class that drafts.
        is_v2: it runs on Model Runner V2 and brings its own attention backend.
        refusals: why it cannot run a configuration, a sentence each.
        chain_reasons: why a target's configuration lets it verify no trees, but chains.
        apply_default_schedule: decides in a configuration what the user has left open.
        tree_arguments: further engine arguments that trees need.
        executor: path of the executor class that stands in for vLLM's `mp`; None for vLLM's own.
    """

    worker: str
    proposer: str
    is_v2: bool
    refusals: Callable[[VllmConfig], Iterator[str]]
    chain_reasons: Callable[[ModelConfig], Iterator[str]] = chain_reasons
    apply_default_schedule: Callable[[VllmConfig], None] = lambda vllm_config: None
    tree_arguments: Mapping[str, Any] = field(default_factory=dict)
    executor: str | None = None


UNTESTED = "REDRAFTER_ALLOW_UNTESTED_PLATFORM"
"""The environment variable that lets a platform through on which nothing was ever run."""


def engine_here() -> Engine:
    """The engine for this platform and vLLM; ConfigError where there is none."""
    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        check_vllm("cpu")
        if envs.VLLM_USE_V2_MODEL_RUNNER:
            raise ConfigError(
                "ReDrafter does not run on Model Runner V2 on a CPU; unset VLLM_USE_V2_MODEL_RUNNER"
            )
        return Engine(
            names.CPU_WORKER,
            names.CPU_PROPOSER,
            is_v2=False,
            refusals=cpu.refusals,
            apply_default_schedule=_constant_k,
            executor=names.CPU_EXECUTOR,
        )
    if current_platform.is_cuda() or _is_rocm_let_through():
        return v2_engine()
    raise ConfigError(
        "ReDrafter runs on vLLM's own platforms for CUDA and for CPUs, not on "
        f"{type(current_platform).__name__} (devices of type {current_platform.device_type!r}): "
        "leave the speculative config out"
    )


def v2_engine() -> Engine:
    """The engine for GPUs; vLLM knows its attention backend from here on."""
    check_vllm("v2")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, names.V2_TREE_ATTENTION)
    return Engine(
        names.V2_WORKER,
        names.V2_SPECULATOR,
        is_v2=True,
        refusals=v2.refusals,
        chain_reasons=v2.chain_reasons,
        apply_default_schedule=schedule.apply_default_schedule,
        tree_arguments={"attention_backend": AttentionBackendEnum.CUSTOM},
    )


def _is_rocm_let_through() -> bool:
    from vllm.platforms import current_platform

    from vllm_redrafter.engine.log import logger

    if not current_platform.is_rocm():
        return False
    known = "the kernels compile for gfx942, and were never run on a GPU of AMD's"
    if os.environ.get(UNTESTED) != "1":
        raise ConfigError(
            f"ReDrafter on ROCm is untested: {known}; set {UNTESTED}=1 to try it, or leave the "
            "speculative config out"
        )
    logger.warning("ReDrafter on ROCm is untested: %s", known)
    return True


def _constant_k(vllm_config: VllmConfig) -> None:
    """Set the same K for all batches: without a schedule, vLLM pads some requests to K rows."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    if speculative.num_speculative_tokens_per_batch_size is None:
        k = vllm_config.num_speculative_tokens
        speculative.num_speculative_tokens_per_batch_size = [(1, 1, k)]  # from one request on
