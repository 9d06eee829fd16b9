# SPDX-License-Identifier: Apache-2.0
"""The texts that workers look for continuations in, and requests of all kinds."""

import random
from typing import Any

import torch
from vllm import SamplingParams

from vllm_redrafter.engine.cpu.v1 import context_matching
from vllm_redrafter.utils.patching import patched


def record_on_cpu(worker: Any) -> None:
    matching, find = worker.model_runner.matching, context_matching.own_matches
    worker.searched, matches = [], matching.matches

    def recorded(batch: Any, active: Any, names: Any, *others: Any) -> Any:
        def read(texts: Any, rows: Any, num_tokens: Any, *limits: Any) -> Any:
            for name, row, size in zip(names, rows, num_tokens, strict=True):
                worker.searched.append((name, texts[row, :size].tolist()))
            return find(texts, rows, num_tokens, *limits)

        with patched(context_matching, own_matches=read):
            return matches(batch, active, names, *others)

    matching.matches = recorded


def record_on_v2(worker: Any) -> None:
    runner = worker.model_runner
    matching, names = runner.speculator.matching, runner.req_states.index_to_req_id
    worker.searched, join = [], matching.join

    def recorded(length: int, found: Any, slots: torch.Tensor) -> Any:
        for slot in slots.tolist():
            if slot in names:  # else a row of padding
                size = int(matching._num_tokens[slot])
                worker.searched.append((names[slot], matching._text[slot, :size].tolist()))
        return join(length, found, slots)

    matching.join = recorded


def run_all_kinds(
    llm: Any, count: int, vocab_size: int, hidden_size: int
) -> dict[str, tuple[list[int] | int, list[int]]]:
    """For `Engine.call`: by request its tokens, or number of embeddings, and its output."""
    engine, rng = llm.llm_engine, random.Random(3)
    asked: dict[str, list[int] | int] = {}
    output: dict[str, list[int]] = {}
    while len(asked) < count or engine.has_unfinished_requests():
        if len(asked) < count:
            name, size = str(len(asked)), rng.randrange(20, 90)
            period = [rng.randrange(vocab_size) for _ in range(rng.randrange(2, 30))]
            asked[name] = rng.choice([size, (period * size)[:size]])
            prompt: Any = {"prompt_token_ids": asked[name]}
            if isinstance(asked[name], int):
                prompt = {"prompt_embeds": torch.randn(size, hidden_size)}
            params = SamplingParams(temperature=0, max_tokens=rng.randrange(4, 30), ignore_eos=True)
            engine.add_request(name, prompt, params)
        for step in engine.step():
            output[step.request_id] = list(step.outputs[0].token_ids)
        if rng.random() < 0.1:
            engine.abort_request([rng.choice([*asked])])
    return {name: (prompt, output.get(name, [])) for name, prompt in asked.items()}
