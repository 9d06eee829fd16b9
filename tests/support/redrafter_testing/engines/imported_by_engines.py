# SPDX-License-Identifier: Apache-2.0
"""What engines import, for the servers that fork off their processes; they start no thread."""

import gc
import os

import vllm.entrypoints.llm  # noqa: F401

if "TRITON_INTERPRET" in os.environ:
    import redrafter_testing.gpu.interpreted_worker  # noqa: F401
    from redrafter_testing.gpu import cuda_engine_on_cpu

    cuda_engine_on_cpu.use()  # a process that is forked off looks for plug-ins on the tests' path
else:
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import vllm_redrafter.engine.cpu.v1.worker  # noqa: F401

gc.freeze()  # vLLM collects garbage several times while it starts
