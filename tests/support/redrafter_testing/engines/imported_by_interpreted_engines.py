"""What an engine under Triton's interpreter imports, for the server that forks off its process.

Its modules must start no thread: a forked process would not have it.
"""

import gc

import vllm.entrypoints.llm  # noqa: F401

import vllm_redrafter.engine.cuda.interpreted_worker  # noqa: F401

gc.freeze()  # vLLM collects garbage several times while it starts
