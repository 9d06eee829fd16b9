# SPDX-License-Identifier: Apache-2.0
"""An engine's answer to one prompt, with a record of its drafts and without."""

from typing import Any


def recorded(
    llm: Any, prompt: list[int], max_tokens: int
) -> tuple[list[int], list[tuple[list[int], int]]]:
    """The answer, and of each step its tokens and verified nodes, the root counted."""
    from vllm_redrafter.engine.cpu.recording import record_answer

    answer, steps = record_answer(llm, prompt, max_tokens)
    return answer, [(s.output_tokens, sum(n.verified for n in s.nodes)) for s in steps]


def greedy(llm: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """The answer."""
    from vllm_redrafter.offline.llm import decode_all

    (steps,) = decode_all(llm.llm_engine, [prompt], max_tokens, 1)
    return [token for step in steps for token in step]
