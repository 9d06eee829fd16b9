# SPDX-License-Identifier: Apache-2.0
"""Names that vLLM, checkpoints and the parts of this project share."""

METHOD = "redrafter"
"""May be given as the speculative config's `method`, to insist on a ReDrafter checkpoint; our part
of `VllmConfig.additional_config` has the same name."""

CPU_WORKER = "vllm_redrafter.engine.cpu.worker.ReDrafterCPUWorker"
CPU_EXECUTOR = "vllm_redrafter.engine.cpu.executor.TreeExecutor"
CPU_PROPOSER = "vllm_redrafter.engine.cpu.proposer.TreeProposer"
CPU_TREE_ATTENTION = "vllm_redrafter.engine.cpu.attention.TreeAttentionBackend"
CUDA_WORKER = "vllm_redrafter.engine.cuda.worker.ReDrafterWorker"
WORKERS = (CPU_WORKER, CUDA_WORKER)
CUDA_SPECULATOR = "vllm_redrafter.engine.cuda.speculator.TreeSpeculator"
CUDA_TREE_ATTENTION = "vllm_redrafter.engine.cuda.attention.TreeAttentionBackend"
CUDA_SCHEDULER = "vllm_redrafter.engine.cuda.scheduler.TreeScheduler"
CUDA_ASYNC_SCHEDULER = "vllm_redrafter.engine.cuda.scheduler.AsyncTreeScheduler"
