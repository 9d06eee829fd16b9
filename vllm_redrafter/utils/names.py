# SPDX-License-Identifier: Apache-2.0
"""Names that vLLM, checkpoints and the parts of this project share."""

METHOD = "redrafter"
"""May be given as the speculative config's `method`, to insist on a ReDrafter checkpoint; our part
of `VllmConfig.additional_config` has the same name."""

CPU_WORKER = "vllm_redrafter.engine.cpu.v1.worker.ReDrafterCPUWorker"
CPU_EXECUTOR = "vllm_redrafter.engine.cpu.executor.TreeExecutor"
CPU_PROPOSER = "vllm_redrafter.engine.cpu.v1.proposer.TreeProposer"
CPU_TREE_ATTENTION = "vllm_redrafter.engine.cpu.attention.TreeAttentionBackend"
V2_WORKER = "vllm_redrafter.engine.v2.worker.ReDrafterWorker"
WORKERS = (CPU_WORKER, V2_WORKER)
V2_SPECULATOR = "vllm_redrafter.engine.v2.speculator.TreeSpeculator"
V2_TREE_ATTENTION = "vllm_redrafter.engine.v2.attention.TreeAttentionBackend"
V2_SCHEDULER = "vllm_redrafter.engine.v2.scheduler.TreeScheduler"
V2_ASYNC_SCHEDULER = "vllm_redrafter.engine.v2.scheduler.AsyncTreeScheduler"
