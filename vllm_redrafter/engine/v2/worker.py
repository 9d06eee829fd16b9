"""The worker that runs TreeModelRunner; vLLM finds it by `worker_cls` (engine/selection.py)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker

from vllm_redrafter.engine.v2.runner import TreeModelRunner
from vllm_redrafter.names import V2_TREE_ATTENTION


class StatisticsRpc:
    """What a V2 worker answers to `LLM.collective_rpc` besides vLLM's own."""

    model_runner: TreeModelRunner

    def redrafter_stats(self) -> dict[str, float]:
        """Counters and seconds since the last reset; all zero before the first."""
        return asdict(self.model_runner.speculator.meter.read())

    def reset_redrafter_stats(self) -> None:
        """Zero the statistics; they are kept from the first call on."""
        self.model_runner.speculator.meter.reset()


class ReDrafterWorker(StatisticsRpc, Worker):
    """vLLM's GPU worker with our model runner and attention backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register_backend(AttentionBackendEnum.CUSTOM, V2_TREE_ATTENTION)
        super().__init__(*args, **kwargs)

    def _make_model_runner(self) -> TreeModelRunner:
        return TreeModelRunner(self.vllm_config, self.device)
