# SPDX-License-Identifier: Apache-2.0
"""mlx-lm as the demo's engine: in this process, one request at a time."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx_lm

from vllm_redrafter.cli.demo.engine import Decoded, Job
from vllm_redrafter.mlx.drafter import load_drafter
from vllm_redrafter.mlx.generation import stream_generate
from vllm_redrafter.mlx.target import check_rope

DTYPE = "bfloat16" if mx.metal.is_available() else "float32"
"""What is fast: MLX widens bfloat16 on a CPU."""


def decode_in_mlx(job: Job) -> Iterator[Decoded]:
    """Decode a job's rounds, as `decode_in_vllm` does; each has one request at once.

    Raises:
        ConfigError: the drafter does not fit.
    """
    # Loaded for each job: plain decoding has mlx-lm's model as mlx-lm made it.
    model, tokenizer, config = mlx_lm.load(job.target, return_config=True)
    check_rope(job.target, config, getattr(model, "args", None))
    model.set_dtype(getattr(mx, job.dtype))
    generate, options = mlx_lm.stream_generate, {}
    if job.speculative_config is not None:
        # Nodes and beams are `load_drafter`'s own: those of the job are for vLLM.
        drafter = load_drafter(job.speculative_config["model"], model)
        generate, options = stream_generate, {"draft_model": drafter}
    for each in job.rounds:
        started = time.perf_counter()
        answers = [
            _steps(generate(model, tokenizer, prompt, each.max_tokens, **options))
            for prompt in each.prompts
        ]
        yield Decoded(time.perf_counter() - started, answers)


def _steps(responses: Iterable[Any]) -> list[list[int]]:
    steps: list[list[int]] = [[]]
    for response in responses:
        steps[-1].append(response.token)
        if not response.from_draft:
            steps.append([])
    return [step for step in steps if step]
