# SPDX-License-Identifier: Apache-2.0
"""The worker that runs GPUTreeModelRunner; vLLM finds it by `worker_cls` (engine/selection.py)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from vllm_redrafter.engine import published
from vllm_redrafter.engine.cuda.runner import GPUTreeModelRunner
from vllm_redrafter.engine.cuda.state_memory import StateMemoryCheck
from vllm_redrafter.engine.published import Publisher
from vllm_redrafter.utils.names import CUDA_TREE_ATTENTION


class CountingWorker(WorkerBase):
    """A V2 worker that says what it counted: to `LLM.collective_rpc`, and to a front end."""

    model_runner: GPUTreeModelRunner

    def init_device(self) -> None:
        super().init_device()
        # All ranks of the last pipeline stage count the same, those of the others nothing.
        counts = get_pp_group().is_last_rank and get_tensor_model_parallel_rank() == 0
        if counts and published.is_wanted():
            engine = self.parallel_config.data_parallel_index
            self.model_runner.table.meter.publisher = Publisher(engine)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM does, the draft included; then tell the front end what was verified."""
        output = super().sample_tokens(*args, **kwargs)
        self.model_runner.table.meter.publish()
        return output

    def redrafter_stats(self) -> dict[str, float]:
        """Counters and seconds since the last reset; all zero before the first.

        In a pipeline, the last rank's are those of the engine.
        """
        return asdict(self.model_runner.table.meter.read())

    def reset_redrafter_stats(self) -> None:
        """Zero the statistics; they are kept from the first call on."""
        self.model_runner.table.meter.reset()


class WakingWorker(WorkerBase):
    """A V2 worker whose drafter comes back after sleep level 2, however the target's weights do."""

    model_runner: GPUTreeModelRunner
    _is_drafter_lost = False

    def sleep(self, level: int = 1) -> None:
        super().sleep(level)
        self._is_drafter_lost |= level == 2

    def wake_up(self, tags: list[str] | None = None) -> None:
        """As vLLM does; then read the drafter's files, if its weights are lost.

        Raises:
            ConfigError: they do not fit any more.
        """
        super().wake_up(tags)
        if self._is_drafter_lost and (tags is None or "weights" in tags):
            if self.model_runner.speculator is not None:
                self.model_runner.speculator.reload()
            self._is_drafter_lost = False


class ReDrafterWorker(StateMemoryCheck, CountingWorker, WakingWorker, Worker):
    """vLLM's GPU worker with our model runner and attention backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register_backend(AttentionBackendEnum.CUSTOM, CUDA_TREE_ATTENTION)
        super().__init__(*args, **kwargs)

    def _make_model_runner(self) -> GPUTreeModelRunner:
        return GPUTreeModelRunner(self.vllm_config, self.device)
