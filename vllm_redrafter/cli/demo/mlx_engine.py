# SPDX-License-Identifier: Apache-2.0
"""mlx-lm as an engine of the demo: in this process, one request at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm

from vllm_redrafter.cli.demo.decoding import DecodingJob
from vllm_redrafter.cli.demo.engine_worker import Decoded, Round
from vllm_redrafter.mlx.drafter import Drafter, load_drafter
from vllm_redrafter.mlx.generation import stream_generate
from vllm_redrafter.mlx.unread_rope import check_rope
from vllm_redrafter.utils.errors import ConfigError


def usual_dtype() -> str:
    """Of a target: what Metal computes fast; on a CPU float32, as MLX widens bfloat16 there."""
    return "bfloat16" if mx.metal.is_available() else "float32"


class MLXEngine:
    """A target of its own, so that plain decoding has mlx-lm's model as mlx-lm made it.

    Args:
        job: what it will decode.

    Raises:
        ConfigError: the drafter does not fit; more than one request at once is asked for.
    """

    def __init__(self, job: DecodingJob) -> None:
        if job.levels != [1]:
            raise ConfigError(f"mlx-lm with a drafter decodes 1 request at once, not {job.levels}")
        self._model, self._tokenizer, config = mlx_lm.load(job.target, return_config=True)
        check_rope(job.target, config, getattr(self._model, "args", None))
        self._model.set_dtype(getattr(mx, job.dtype))
        self._drafter = self._drafter_of(job.speculative_config)

    def _drafter_of(self, speculation: dict[str, Any] | None) -> Drafter | None:
        if speculation is None:
            return None
        # Nodes and beams are as many as `load_drafter` finds right here: the job's are for vLLM.
        matches = speculation["context_matches"]
        return load_drafter(speculation["model"], self._model, context_matches=matches)

    def decode(self, asked: Round, on_answer: Callable[[], None]) -> Decoded:
        """Decode a round.

        Args:
            asked: the round.
            on_answer: called for each answer that is finished.
        """
        started, answers = time.perf_counter(), []
        for prompt in asked.prompts:
            answers.append(self._answer(prompt, asked.max_tokens))
            on_answer()
        seconds = time.perf_counter() - started
        # The first step of an answer is its prompt's.
        steps = [step for answer in answers for step in answer[1:]]
        counted = {
            "sampled_tokens": float(sum(map(len, steps))),
            "verifications": float(len(steps)),
        }
        return Decoded(seconds, answers, counted if self._drafter else {})

    def _answer(self, prompt: list[int], max_tokens: int) -> list[list[int]]:
        """The tokens of each step; all but a step's last one were drafted."""
        if self._drafter is None:
            responses = mlx_lm.stream_generate(self._model, self._tokenizer, prompt, max_tokens)
        else:
            responses = stream_generate(
                self._model, self._tokenizer, prompt, max_tokens, draft_model=self._drafter
            )
        steps: list[list[int]] = [[]]
        for response in responses:
            steps[-1].append(response.token)
            if not response.from_draft:
                steps.append([])
        return [step for step in steps if step]
