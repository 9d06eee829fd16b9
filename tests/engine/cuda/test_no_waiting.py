# SPDX-License-Identifier: Apache-2.0
"""Nothing in the step waits for the device: staging, sampling, walk, compaction, drafting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.gpu import no_waiting
from redrafter_testing.gpu.no_waiting import NoWaiting
from redrafter_testing.requests import small_workloads


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: 1 if x[0] else 0,
    ],
)
def test_waiting_is_noticed(waits: Callable[[torch.Tensor], Any]) -> None:
    watcher = NoWaiting()
    with watcher.watching():
        waits(torch.tensor([1.0, 0.0, 2.0]))
    assert watcher.found


@pytest.mark.engine
def test_nothing_in_the_step_waits(oracle: Engine) -> None:
    oracle.rpc(no_waiting.watch)
    oracle.run(small_workloads.EVERYTHING)
    ((calls, found),) = oracle.rpc(no_waiting.findings)
    assert calls > 10
    assert not found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's sync debug mode needs a GPU")
def test_a_draft_does_not_wait_on_a_gpu() -> None:
    from vllm_redrafter.engine.cuda.draft_search import DraftSearch
    from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
    from vllm_redrafter.tree.policy import SearchShape, candidate_log_probs
    from vllm_redrafter.triton_kernels.build_tree import NodeLimits, TreeBuffers, build_tree

    drafter = RecurrentHead(RecurrentConfig(512, 64, 64)).cuda()
    table = torch.nn.Embedding(512, 64).cuda()
    hidden, roots = torch.randn(3, 64, device="cuda"), torch.arange(3, device="cuda")
    search = DraftSearch(drafter, table, table, SearchShape(4, 4), max_requests=3)
    trees, node_limits = TreeBuffers(3, 12, "cuda"), NodeLimits((roots > 1).int(), roots.int() + 9)

    def draft() -> None:
        explored, _ = search.explore(hidden, roots)
        scores = candidate_log_probs(explored, "beams")
        found = explored.tokens, explored.back_pointers, scores
        build_tree(roots, *found, out=trees, node_limits=node_limits)

    draft()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        draft()
    finally:
        torch.cuda.set_sync_debug_mode("default")
