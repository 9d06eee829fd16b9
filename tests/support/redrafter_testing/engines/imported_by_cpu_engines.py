# SPDX-License-Identifier: Apache-2.0
"""What a CPU engine imports, for the server that forks off its process.

Its modules must start no thread: a forked process would not have it.
"""

import gc

import vllm.entrypoints.llm  # noqa: F401
import vllm.v1.worker.cpu_worker  # noqa: F401

import vllm_redrafter.engine.cpu.worker  # noqa: F401

gc.freeze()  # vLLM collects garbage several times while it starts
