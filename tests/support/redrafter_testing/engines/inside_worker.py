# SPDX-License-Identifier: Apache-2.0
"""What tests ask of a V2 worker from inside its process, by `Engine.rpc`."""

from collections import Counter
from typing import Any

import torch


def match_probabilities(worker: Any) -> list[Any]:
    """How probable nodes of prompt-lookup (n-gram) matches are, as learned so far."""
    return worker.model_runner.speculator.matching.probabilities.tolist()


def reload_drafter(worker: Any) -> None:
    """As after sleep level 2."""
    from vllm_redrafter.engine.replacement import read_replacement

    read_replacement(worker.model_runner.trunk)()


def last_weights(worker: Any) -> Any:
    """Those of the drafter for the last token that the rank ranks, a list."""
    return worker.model_runner.trunk.drafter.vocabulary_layer.weight[-1].tolist()


def let_first_rank_read(worker: Any, can_read: bool) -> None:
    """Whether the first rank can read another drafter."""

    def fail(_: Any) -> None:
        raise OSError("the first rank cannot")

    if worker.rank == 0 and can_read:
        del worker.model_runner.trunk.replacement
    elif worker.rank == 0:
        worker.model_runner.trunk.replacement = fail


def keep_draft_starts(worker: Any) -> None:
    """Fill `worker.starts` with the hidden states, (1 + n) H, that drafts start from."""
    speculator, worker.starts = worker.model_runner.speculator, []
    propose = speculator.propose

    def propose_and_keep(input_batch: Any, *inputs: Any, **others: Any) -> torch.Tensor:
        drafts = propose(input_batch, *inputs, **others)
        worker.starts += speculator.inputs.hidden[: input_batch.num_reqs].tolist()
        return drafts

    speculator.propose = propose_and_keep


def head_and_trees(worker: Any) -> tuple[int, list[list[int]]]:
    """How many tokens the rank's draft head has rows for, and the tokens of its trees."""
    speculator = worker.model_runner.speculator
    weight = speculator.trunk.drafter.vocabulary_layer.weight
    return weight.shape[0], speculator.trees.tokens.tolist()


def forget_embedding(worker: Any) -> None:
    """What the rank embeds tokens with is lost, if it has any."""
    for name, weight in worker.model_runner.model.named_parameters():
        if "embed_tokens" in name:
            weight.data.zero_()


def experts_of_rank(worker: Any) -> list[int]:
    """Where the rank has each expert of its first layer of them; -1 where another rank has it."""
    modules = worker.model_runner.model.modules()
    return next(layer.expert_map for layer in modules if hasattr(layer, "expert_map")).tolist()


def sample_in_chunks(worker: Any, rows: int) -> None:
    """Logits are sampled in chunks of at most this many rows, as those above 1 GB are."""
    from vllm_redrafter.engine.v2 import tree_verifier

    worker.whole = tree_verifier.get_max_chunk_logits, tree_verifier._iter_request_chunks
    worker.chunks_of_steps = []

    def chunks(*args: Any) -> list[tuple[int, int]]:
        made = list(worker.whole[1](*args))
        worker.chunks_of_steps.append(len(made))
        return made

    tree_verifier.get_max_chunk_logits = lambda vocab_size: rows
    tree_verifier._iter_request_chunks = chunks


def stop_sampling_in_chunks(worker: Any) -> list[int]:
    """Returns how many chunks each step had."""
    from vllm_redrafter.engine.v2 import tree_verifier

    tree_verifier.get_max_chunk_logits, tree_verifier._iter_request_chunks = worker.whole
    return worker.chunks_of_steps


def count_launches(worker: Any, keeps: bool) -> None:
    """From here on fill `worker.launches`: of each step, whether requests had finished, and how
    often it launched each kernel; as without earlier answers unless it `keeps` them."""
    from triton.runtime.interpreter import GridExecutor

    runner, worker.launches = worker.model_runner, []
    if not hasattr(worker, "kept"):
        worker.kept, execute = runner.table.earlier, runner.execute_model
        launch = GridExecutor.__call__

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            worker.launches.append((bool(scheduled.finished_req_ids), Counter()))
            return execute(scheduled, *args, **kwargs)

        def launch_and_count(executor: Any, *args: Any, **kwargs: Any) -> None:
            worker.launches[-1][1][executor.fn.__name__] += 1
            launch(executor, *args, **kwargs)

        runner.execute_model, GridExecutor.__call__ = execute_model, launch_and_count
    runner.table.earlier = runner.speculator.matching.earlier = worker.kept if keeps else None


def drafter_tensors(worker: Any) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """The drafter's tensors by name: where they lie, and copies of them."""
    tensors = worker.model_runner.trunk.drafter.state_dict()
    return (
        {name: tensor.data_ptr() for name, tensor in tensors.items()},
        {name: tensor.clone() for name, tensor in tensors.items()},
    )


def pretend_graphs_with_other_scales(worker: Any) -> None:
    """As if graphs had been captured, and then the next reload brought other K and V scales."""
    runner, layer = worker.model_runner, attention_layers(worker)[0]
    runner.cudagraph_manager.graphs["captured"] = None
    worker.dtype_of_layer, layer.kv_cache_dtype = layer.kv_cache_dtype, "fp8"
    read = runner.trunk.replacement

    def read_and_scale(checkpoint: Any) -> Any:
        put = read(checkpoint)
        return lambda: (put(), setattr(layer, "_k_scale_float", layer._k_scale_float / 2))

    runner.trunk.replacement = read_and_scale


def pretend_no_graphs(worker: Any) -> None:
    layer = attention_layers(worker)[0]
    layer.kv_cache_dtype = worker.dtype_of_layer
    layer._k_scale_float *= 2
    worker.model_runner.cudagraph_manager.graphs.clear()
    del worker.model_runner.trunk.replacement


def attention_layers(worker: Any) -> list[Any]:
    return list(worker.vllm_config.compilation_config.static_forward_context.values())


def kv_caches(worker: Any) -> list[tuple[str, float, float]]:
    """Per attention layer: the dtype of its cache, and what K and V are divided by."""
    return [
        (layer.kv_cache_dtype, layer._k_scale_float, layer._v_scale_float)
        for layer in attention_layers(worker)
    ]


def made_by_the_gpu_worker(worker: Any) -> list[str]:
    """Another model runner, made as CUDA's worker makes it: its class, and its speculator's."""
    from vllm_redrafter.engine.v2.worker import ReDrafterWorker

    runner = ReDrafterWorker._make_model_runner(worker)
    assert runner is not worker.model_runner
    kinds = map(type, (runner, runner.speculator))
    return [f"{kind.__module__}.{kind.__name__}" for kind in kinds]
