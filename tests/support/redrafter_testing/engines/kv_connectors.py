# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connectors in engines without CUDA, and what they were given."""

import os
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "CopyingSpec",
        "spec_module_path": __name__,
        "cpu_bytes_to_use": 1 << 26,
        "offload_prompt_only": False,
    },
}
"""The connector itself is vLLM's; only what copies blocks with CUDA is replaced."""


def example(folder: object) -> dict[str, Any]:
    """vLLM's example connector, which keeps prompts in a folder."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def use() -> None:
    """For `setup`: both connectors are allowed; engines agree on the hashes of blocks."""
    from vllm_redrafter.engine import kv_connectors

    kv_connectors.ON_CUDA |= {"ExampleConnector"}
    kv_connectors.ON_CPU |= {"ExampleConnector", "OffloadingConnector"}
    os.environ["PYTHONHASHSEED"] = "0"


class CopyingWorker(OffloadingWorker):
    """Copies blocks when it is told to: a copy stream that waits for the current one would then."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self.caches = [cache.tensor for cache in kv_caches.tensors]
        self.host = [torch.zeros(chunks, *cache.shape[1:]).to(cache) for cache in self.caches]
        self.loaded = 0
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self.caches, src_spec.block_ids, self.host, dst_spec.block_ids)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        self.loaded += len(src_spec.block_ids)
        return self._copy(job_id, self.host, src_spec.block_ids, self.caches, dst_spec.block_ids)

    def _copy(self, job_id: int, sources: Any, read: Any, targets: Any, written: Any) -> bool:
        for source, target in zip(sources, targets, strict=True):
            target[torch.from_numpy(written).long()] = source[torch.from_numpy(read).long()]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """What was submitted has been copied."""


class CopyingSpec(CPUOffloadingSpec):
    """vLLM's offloading to host memory with this worker, its own accepting CUDA alone."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CopyingWorker(kv_caches, self.num_chunks)


def loaded_blocks(worker: Any) -> int:
    """For `Engine.rpc`: how many blocks came back from the host."""
    return get_kv_transfer_group().connector_worker.worker.loaded


def stored_blocks(llm: Any) -> dict[bytes, Tensor]:
    """For `Engine.call`: K and V of each block on the host, by the hash of the text to its end."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    chunks = scheduler.get_kv_connector().connector_scheduler.manager._policy.chunks
    (host,) = llm.collective_rpc(_host)
    return {
        bytes(key): torch.stack([tensor[chunk.chunk_id] for tensor in host]).view(torch.float32)
        for key, chunk in chunks.items()
    }


def _host(worker: Any) -> list[Tensor]:
    return get_kv_transfer_group().connector_worker.worker.host
