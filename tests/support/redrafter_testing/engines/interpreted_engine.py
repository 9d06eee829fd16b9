# SPDX-License-Identifier: Apache-2.0
"""vLLM with Model Runner V2 on the CPU, its Triton kernels and ours under Triton's interpreter."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from redrafter_testing.engines import forked_engine
from redrafter_testing.engines.forked_engine import Engine, ForkServer, Setup, setups_in
from redrafter_testing.python_path import SUPPORT, python_path

ENVIRONMENT = {
    **forked_engine.ENVIRONMENT,
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up run
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",  # read while vLLM is imported; without graphs, nothing
    "TORCHDYNAMO_DISABLE": "1",  # its compiler would ask our backend "cpu" of Triton for code
    "PYTHONPATH": python_path(SUPPORT / "interpreted", SUPPORT),
}

SETTINGS = {"max_num_seqs": 8, "block_size": 32, "max_model_len": 256}

SERVER = ForkServer(ENVIRONMENT)


def interpreted_engine(
    target: Path,
    setup: Setup = None,
    environment: Mapping[str, str] | None = None,
    attention_kernels: bool = False,
    **arguments: Any,
) -> AbstractContextManager[Engine]:
    """An engine in float32, with variables and arguments besides, or instead of, those above.

    Without CUDA graphs and `attention_kernels`, attention is torch's, and steps take half the time.
    """
    in_torch = arguments.get("enforce_eager", True) and not attention_kernels
    return forked_engine.forked_engine(
        target,
        SERVER,
        {**ENVIRONMENT, **(environment or {})},
        [_use_triton_mla, fork_processes, *[use_torch_attention] * in_torch, *setups_in(setup)],
        settle_worker,
        {**SETTINGS, **arguments},
    )


def use_torch_attention() -> None:
    """In this process, and in those that it forks."""
    from redrafter_testing.gpu import torch_flash_attention, torch_tree_attention

    torch_flash_attention.use()
    torch_tree_attention.use()


def _use_triton_mla() -> None:
    from redrafter_testing.gpu import triton_mla

    triton_mla.use()


def fork_processes() -> None:
    """vLLM forks its processes, which need not import it then; its CPU platform spawns them."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def fork(cls: type, vllm_config: Any) -> None:
        update(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(fork)


def settle_worker(worker: Any) -> None:
    """Replace parts of vLLM that are not what is tested."""
    from redrafter_testing.gpu import replaced_parts

    replaced_parts.use()


def use_triton_attention() -> None:
    """For `setup`: plain engines get vLLM's Triton attention instead of its CPU attention."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
    register_backend(AttentionBackendEnum.CPU_ATTN, backend)
