# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine's worker on a CPU: its kernels interpreted, what is drafted drafted by torch."""

from typing import Any

import torch

# First: it replaces what vLLM's runner calls of torch.cuda.
from vllm.v1.worker import cpu_worker  # isort: skip

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu import model_runner as cpu_model_runner

from redrafter_testing.gpu import torch_drafting
from redrafter_testing.gpu.host_event import HostEvent
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.engine.v2.runner import GPUTreeModelRunner
from vllm_redrafter.engine.v2.worker import TreeWorker
from vllm_redrafter.utils.names import V2_TREE_ATTENTION
from vllm_redrafter.utils.patching import patched

cuda: Any = torch.cuda
cuda.Event = HostEvent
torch_drafting.use()


class InterpretedTreeModelRunner(GPUTreeModelRunner, cpu_model_runner.CPUModelRunner):
    """GPUTreeModelRunner with what CPUWorker calls besides."""


class InterpretedWorker(TreeWorker, cpu_worker.CPUWorker):
    """vLLM's CPU worker with our V2 model runner and attention backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if Settings.of(self.vllm_config).config.tree != "chain":
            # The CPU platform always asks for CPU_ATTN; only this process sees the override.
            register_backend(AttentionBackendEnum.CPU_ATTN, V2_TREE_ATTENTION)

    def init_device(self) -> None:
        # The class is imported by name when it is needed.
        with patched(cpu_model_runner, CPUModelRunner=InterpretedTreeModelRunner):
            super().init_device()
