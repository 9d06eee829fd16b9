"""What tests do to a V2 worker from inside its process, by `InterpretedEngine.rpc`."""

from __future__ import annotations

from typing import Any

import torch


def padded_draft_differs(worker: Any) -> list[str]:
    """Draft for 3 requests, then again with padding, as a CUDA graph of 8 has it: what differs?"""
    from vllm_redrafter.engine.v2.speculator import TreeSpeculator
    from vllm_redrafter.plugin import substituted

    speculator = worker.model_runner.speculator
    trees, slots = speculator.trees, torch.tensor([5, 0, 2])
    generator = torch.Generator().manual_seed(0)
    speculator._hidden.normal_(generator=generator)
    speculator._roots.random_(2, 500, generator=generator)
    speculator._chain.copy_(torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]))
    speculator._slots.fill_(speculator.max_num_reqs)
    speculator._slots[:3] = slots
    results = []
    # The oracle is random; the real drafter is not.
    explore = TreeSpeculator.explore.__get__(speculator)
    with substituted(speculator, "explore", explore):
        for requests in (3, 8):
            for field in (trees.tokens, trees.parents, trees.depths, trees.ancestors):
                field.fill_(-7)
            speculator.draft(requests)
            results.append(
                {
                    "drafts": speculator._drafts[:3].clone(),
                    "tokens": trees.tokens[slots],
                    "parents": trees.parents[slots],
                    "depths": trees.depths[slots],
                    "ancestors": trees.ancestors[slots],
                    "untouched": trees.tokens[[1, 3, 4, 6, 7]],
                }
            )
    trees.clear()
    return [name for name in results[0] if not torch.equal(results[0][name], results[1][name])]


def attend_as_in_graphs(worker: Any) -> None:
    """Uniform decoding steps take the path that full CUDA graphs hold: all rows are trees'."""
    from vllm.config.compilation import CUDAGraphMode

    state = worker.model_runner.model_state
    prepare = state.prepare_attn
    worker.steps_as_in_graphs = 0
    length = state.speculator.config.num_speculative_tokens + 1

    def prepare_attn(input_batch: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        if (input_batch.num_scheduled_tokens == length).all() and not input_batch.has_prefill:
            mode = CUDAGraphMode.FULL
            worker.steps_as_in_graphs += 1
        return prepare(input_batch, mode, *args, **kwargs)

    state.prepare_attn = prepare_attn


def stop_attending_as_in_graphs(worker: Any) -> int:
    """Returns how many steps did."""
    del worker.model_runner.model_state.prepare_attn
    return worker.steps_as_in_graphs
