# SPDX-License-Identifier: Apache-2.0
"""What a CPU engine imports, for the server that forks off its process; they start no thread."""

import gc

import vllm.entrypoints.llm  # noqa: F401
import vllm.v1.worker.cpu_worker  # noqa: F401

import vllm_redrafter.engine.cpu.worker  # noqa: F401

gc.freeze()  # vLLM collects garbage several times while it starts
