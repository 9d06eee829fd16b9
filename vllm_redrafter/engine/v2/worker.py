# SPDX-License-Identifier: Apache-2.0
"""The worker that runs GPUTreeModelRunner; vLLM finds it by `worker_cls` (engine/selection.py)."""

from dataclasses import asdict
from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from vllm_redrafter.engine.log import logger
from vllm_redrafter.engine.published import Publisher
from vllm_redrafter.engine.replacement import read_replacement, swap
from vllm_redrafter.engine.v2.runner import GPUTreeModelRunner
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.names import V2_TREE_ATTENTION


class TreeWorker(WorkerBase):
    """A V2 worker that counts, checks recurrent states' memory, and wakes the drafter up."""

    model_runner: GPUTreeModelRunner
    _sleep_level = 0  # of the drafter's weights

    def init_device(self) -> None:
        super().init_device()
        # All ranks of the last pipeline stage count the same, those of the others nothing.
        counts = get_pp_group().is_last_rank and get_tensor_model_parallel_rank() == 0
        if counts:
            engine = self.parallel_config.data_parallel_index
            self.model_runner.table.meter.publisher = Publisher.if_wanted(engine)

    def determine_available_memory(self) -> int:
        """As vLLM does; ConfigError where not even one request's recurrent states fit."""
        available: int = super().determine_available_memory()
        # A request keeps a state behind every node that is verified.
        specs = (spec for spec in self.get_kv_cache_spec().values() if isinstance(spec, MambaSpec))
        needed = sum(spec.page_size_bytes * (1 + spec.num_speculative_blocks) for spec in specs)
        if not needed:
            return available
        nodes = self.vllm_config.num_speculative_tokens
        states = f"{1 + nodes} recurrent states in each layer, {needed / 2**20:.1f} MiB"
        if needed > available:
            raise ConfigError(
                f"with num_speculative_tokens={nodes} a request keeps {states}, and "
                f"{available / 2**20:.1f} MiB are left for the cache: lower num_speculative_tokens"
            )
        logger.info("With num_speculative_tokens=%d a request keeps %s", nodes, states)
        return available

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        self.model_runner.table.meter.publish()
        return output

    def redrafter_stats(self) -> dict[str, float]:
        """Counters and seconds since the last reset; those of a pipeline are the last rank's."""
        return asdict(self.model_runner.table.meter.read())

    def reset_redrafter_stats(self) -> None:
        """Zero the statistics; they are kept from the first call on."""
        self.model_runner.table.meter.reset()

    def reset_earlier_answers(self) -> None:
        """Forget them, when vLLM forgets cached prefixes."""
        if (earlier := self.model_runner.table.earlier) is not None:
            earlier.clear()

    def sleep(self, level: int = 1) -> None:
        super().sleep(level)
        self._sleep_level = max(self._sleep_level, level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """As vLLM does; then read the drafter again if its weights are lost."""
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            level, self._sleep_level = self._sleep_level, 0
            if level == 2 and (replace := read_replacement(self.model_runner.trunk)):
                replace()

    def redrafter_swap(self, model: str, revision: str | None = None) -> dict[str, str] | None:
        """See `swap`; `model` is a folder on the workers' machines, or a hub id."""
        asleep = "the engine sleeps: wake it up first" if self._sleep_level else None
        return swap(self.model_runner.trunk, model, revision, asleep)


class ReDrafterWorker(TreeWorker, Worker):
    """vLLM's GPU worker with our model runner and attention backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register_backend(AttentionBackendEnum.CUSTOM, V2_TREE_ATTENTION)
        super().__init__(*args, **kwargs)

    def _make_model_runner(self) -> GPUTreeModelRunner:
        return GPUTreeModelRunner(self.vllm_config, self.device)
