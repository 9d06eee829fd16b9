# SPDX-License-Identifier: Apache-2.0
"""The memory of recurrent states: a request keeps one behind every node that is verified."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.worker.worker_base import WorkerBase

from vllm_redrafter.utils.errors import ConfigError

logger = init_logger("vllm.redrafter")


def state_bytes(specs: Mapping[str, KVCacheSpec]) -> int:
    """What one request's states take, in bytes; 0 for targets without any.

    Args:
        specs: of the target's layers, by name.
    """
    states = (spec for spec in specs.values() if isinstance(spec, MambaSpec))
    return sum(spec.page_size_bytes * (1 + spec.num_speculative_blocks) for spec in states)


class StateMemoryCheck(WorkerBase):
    """A worker that says what recurrent states take, and refuses more of them than there is room
    for."""

    def determine_available_memory(self) -> int:
        """As vLLM does.

        Raises:
            ConfigError: not even one request's states fit into it.
        """
        available: int = super().determine_available_memory()
        needed = state_bytes(self.get_kv_cache_spec())
        nodes = self.vllm_config.num_speculative_tokens
        if not needed:
            return available
        states = f"{1 + nodes} recurrent states in each layer, {needed / 2**20:.1f} MiB"
        if needed > available:
            raise ConfigError(
                f"with num_speculative_tokens={nodes} a request keeps {states}, and "
                f"{available / 2**20:.1f} MiB are left for the cache: lower num_speculative_tokens"
            )
        logger.info("With num_speculative_tokens=%d a request keeps %s", nodes, states)
        return available
