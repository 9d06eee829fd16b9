# SPDX-License-Identifier: Apache-2.0
"""Which graph a decoding step of each size gets; vLLM's own dispatch is asked."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_redrafter.engine.v2.graph_manager import DraftGraphManager, TreeGraphManager, is_mixed
from vllm_redrafter.engine.v2.schedule import default_schedule
from vllm_redrafter.utils.names import METHOD

VLLM_S_OWN = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
K = 12
LENGTHS = (1, 3, 5)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    only = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: only)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None)


def manager(
    kind: type[Any] = TreeGraphManager,
    *,
    requests: int = 256,
    budget: int = 8192,
    schedule: list[tuple[int, int, int]] | None = None,
    own_graph_sizes: bool = False,
    varying: bool = False,
    adapters: list[int] | None = None,
    mixed: bool = False,
) -> Any:
    """As the runner makes it, with its graphs said to be captured."""
    config: Any = SimpleNamespace(
        num_speculative_tokens=K,
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=VLLM_S_OWN, max_cudagraph_capture_size=512
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens_per_batch_size=schedule,
            uses_dynamic_speculative_decoding=lambda: schedule is not None,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=budget),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        model_config=SimpleNamespace(get_vocab_size=lambda: 128256),
        additional_config={
            METHOD: {
                "model": "drafter",
                "num_speculative_tokens": K,
                "own_graph_sizes": own_graph_sizes,
            }
        },
    )
    device, mode = torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE
    made: Any
    if kind is DraftGraphManager:
        made = DraftGraphManager(config, device, mode, lengths=LENGTHS)
    else:
        target = {"plain_steps": False, "mixed_obstacles": [] if mixed else ["a reason"]}
        made = kind(config, device, mode, K + 1, adapters, varlen_decode=varying, **target)
    made._graphs_captured = True
    return made


def dispatched(made: Any, requests: int, rows: int, adapters: int = 0) -> Any:
    """The graph of a uniform step."""
    return made.dispatch(requests, requests * rows, rows, num_active_loras=adapters)


def number_of_graphs(made: Any, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> int:
    return len(made._capture_descs[mode])


def assert_graph(desc: Any, requests: int, rows: int) -> None:
    """It is a full one, for no more than an eighth, or one request, above these."""
    assert desc.cg_mode == CUDAGraphMode.FULL
    assert desc.uniform_token_count == rows
    assert desc.num_tokens == desc.num_reqs * rows
    assert requests <= desc.num_reqs <= max(requests * 9 / 8, requests + 1)


def test_batches_of_one_k_have_a_graph_up_to_the_largest() -> None:
    made = manager()
    for requests in range(1, 257):
        assert_graph(dispatched(made, requests, K + 1), requests, K + 1)
    assert number_of_graphs(made) == 35 + 17  # vLLM's own, and those beyond


def test_no_graph_is_larger_than_a_step_may_be() -> None:
    made = manager(budget=2048)
    assert_graph(dispatched(made, 157, K + 1), 157, K + 1)
    assert dispatched(made, 158, K + 1).cg_mode == CUDAGraphMode.NONE
    made = manager(budget=600)  # piecewise ones
    assert made.dispatch(3, 600, None, 0).num_tokens == 600
    assert made.dispatch(3, 601, None, 0).cg_mode == CUDAGraphMode.NONE


def test_a_step_of_a_few_rows_more_is_not_padded_to_another_k_s_graph() -> None:
    """With the default schedule, K is 12, 11, ... 0."""
    schedule = default_schedule(K, 1024, 206)
    made = manager(requests=1024, schedule=schedule)
    for first, last, k in schedule:
        for requests in range(first, last + 1):
            assert_graph(dispatched(made, requests, k + 1), requests, k + 1)
    assert number_of_graphs(made) < 64
    # Requests have ended since their drafts were made: the K is that of a larger batch.
    assert dispatched(made, 30, 5).num_reqs == 38


def test_trees_of_varying_sizes_have_a_graph_up_to_what_is_sampled_at_once() -> None:
    made = manager(varying=True)
    at_once = 2092  # 1 GB of float32 logits
    for rows in range(1, at_once + 1):
        desc = made.dispatch(min(rows, 256), rows, None, 0, max_query_len=K + 1)
        assert desc.cg_mode == CUDAGraphMode.FULL
        assert rows <= desc.num_tokens <= max(rows * 9 / 8, rows + 16)
        assert desc.num_reqs == min(desc.num_tokens, 256)
    assert made.dispatch(256, at_once + 1, None, 0, K + 1).cg_mode == CUDAGraphMode.NONE
    assert number_of_graphs(made) == len(VLLM_S_OWN) + 12


def test_steps_with_adapters_have_the_graphs_of_those_without() -> None:
    """Of five adapters in use; vLLM captures powers of two."""
    schedule, captured = default_schedule(K, 1024, 206), [0, 1, 2, 4, 5]
    plain = manager(requests=1024, schedule=schedule)
    made = manager(requests=1024, schedule=schedule, adapters=captured)
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
        assert number_of_graphs(made, mode) == len(captured) * number_of_graphs(plain, mode)
    for adapters in range(6):
        expected = min(case for case in captured if case >= adapters)
        for _, last, k in schedule:
            desc = dispatched(made, last, k + 1, adapters)
            assert_graph(desc, last, k + 1)
            assert desc.num_active_loras == expected
        desc = made.dispatch(3, 2000, None, adapters)
        assert (desc.cg_mode, desc.num_active_loras) == (CUDAGraphMode.PIECEWISE, expected)


def test_drafts_of_each_length_have_a_graph_up_to_the_largest_batch() -> None:
    made = manager(DraftGraphManager, requests=1024)
    for requests in (1, 3, 500, 512, 513, 800, 1024):
        for length in LENGTHS:
            desc = made.dispatch(requests, requests, length, num_active_loras=0)
            assert (desc.cg_mode, desc.uniform_token_count) == (CUDAGraphMode.FULL, length)
            assert requests <= desc.num_reqs <= max(requests * 9 / 8, requests + 16)


@pytest.mark.parametrize("varying", [False, True])
def test_steps_that_read_prompts_get_piecewise_graphs_or_full_ones(varying: bool) -> None:
    """vLLM's own, and further ones that pad by an eighth at most; or mixed ones, 64 rows apart."""
    made = manager(varying=varying)
    for rows in (1, 100, 512, 513, 700, 1500, 2048):
        desc = made.dispatch(3, rows, None, 0)
        assert desc.cg_mode == CUDAGraphMode.PIECEWISE
        assert desc.num_reqs is None, "of any number of requests"
        if rows <= 512:
            assert desc.num_tokens == min(size for size in VLLM_S_OWN if size >= rows)
        else:
            assert rows <= desc.num_tokens <= rows * 9 / 8
    assert made.dispatch(3, 2049, None, 0).cg_mode == CUDAGraphMode.NONE
    captured = [desc.num_tokens for desc in made._capture_descs[CUDAGraphMode.PIECEWISE]]
    assert captured == sorted(captured, reverse=True), "the largest first, whose memory others use"
    assert len(captured) == len(VLLM_S_OWN) + 12
    mixed = manager(varying=varying, mixed=True)
    descs = {mixed.dispatch(3, rows, None, 0) for rows in range(1, 1025)}
    assert {desc.num_tokens for desc in descs if is_mixed(desc)} == {*range(64, 1025, 64)}
    for rows in (13, 65, 520, 2041):  # Decoding steps keep theirs, as do larger ones with prompts.
        step = rows // 13, rows, 13, 0, K + 1
        assert mixed.dispatch(*step) == made.dispatch(*step)
    assert len(descs) == 16 and mixed.dispatch(3, 1025, None, 0) == made.dispatch(3, 1025, None, 0)


def test_the_user_s_own_sizes_are_kept() -> None:
    made = manager(own_graph_sizes=True, mixed=True)
    full = made._capture_descs[CUDAGraphMode.FULL]
    assert {desc.num_tokens for desc in full} == {
        -(-size // 13) * 13 for size in VLLM_S_OWN if size <= 507
    }
    assert dispatched(made, 40, K + 1).cg_mode == CUDAGraphMode.NONE
    varying = manager(own_graph_sizes=True, varying=True, mixed=True)
    for descs in varying._capture_descs.values():
        assert {desc.num_tokens for desc in descs} == {*VLLM_S_OWN}
    assert made.dispatch(3, 513, None, 0).cg_mode == CUDAGraphMode.NONE
