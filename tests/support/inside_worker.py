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


def sample_in_chunks(worker: Any, rows: int) -> None:
    """Logits are sampled in chunks of at most this many rows, as those above 1 GB are."""
    from vllm_redrafter.engine.v2 import scorer

    worker.whole = scorer.get_max_chunk_logits, scorer._iter_request_chunks
    worker.chunks_of_steps = []

    def chunks(*args: Any) -> list[tuple[int, int]]:
        made = list(worker.whole[1](*args))
        worker.chunks_of_steps.append(len(made))
        return made

    scorer.get_max_chunk_logits = lambda vocab_size: rows
    scorer._iter_request_chunks = chunks


def stop_sampling_in_chunks(worker: Any) -> list[int]:
    """Returns how many chunks each step had."""
    from vllm_redrafter.engine.v2 import scorer

    scorer.get_max_chunk_logits, scorer._iter_request_chunks = worker.whole
    return worker.chunks_of_steps


def spoil_weights(worker: Any) -> None:
    """Overwrite what sleep level 2 discards; vLLM saves the target's buffers, and no others."""
    runner = worker.model_runner
    drafter = runner.speculator.drafter
    for tensor in (*runner.model.parameters(), *drafter.parameters(), *drafter.buffers()):
        tensor.data.fill_(1)


def drafter_tensors(worker: Any) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """The drafter's tensors by name: where they lie, and copies of them."""
    tensors = worker.model_runner.speculator.drafter.state_dict()
    return (
        {name: tensor.data_ptr() for name, tensor in tensors.items()},
        {name: tensor.clone() for name, tensor in tensors.items()},
    )


def kv_cache_groups(worker: Any) -> int:
    return len(worker.model_runner.kv_cache_config.kv_cache_groups)


def kv_caches(worker: Any) -> list[tuple[str, float, float]]:
    """Per attention layer: the dtype of its cache, and what K and V are divided by."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [(layer.kv_cache_dtype, layer._k_scale_float, layer._v_scale_float) for layer in layers]
