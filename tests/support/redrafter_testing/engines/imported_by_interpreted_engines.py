# SPDX-License-Identifier: Apache-2.0
"""What an engine under Triton's interpreter imports, for the server that forks it off."""

import gc

import vllm.entrypoints.llm  # noqa: F401

import redrafter_testing.gpu.interpreted_worker  # noqa: F401
from redrafter_testing.gpu import cuda_engine_on_cpu

cuda_engine_on_cpu.use()  # a process that is forked off looks for plug-ins on the tests' path

gc.freeze()  # vLLM collects garbage several times while it starts
