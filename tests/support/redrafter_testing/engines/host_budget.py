# SPDX-License-Identifier: Apache-2.0
"""The batch's budget on Model Runner V2 without a runner: what it asks of one is made up."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from vllm_redrafter.engine.v2.stats import StepTimer
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees


def host_budget(
    patch: pytest.MonkeyPatch,
    module: Any,
    milliseconds: Callable[[], float],
    requests: int,
    nodes: int,
    rows: int,
    lengths: Sequence[int],
) -> Any:
    """A `TreeBudget` of the module, of greedy requests behind their prompts of five tokens.

    The host's clock says `milliseconds`; all work of a device is done when its call returns.
    """
    alone = SimpleNamespace(broadcast_object=lambda value, src: value)
    for each in (adaptive_verification, module):
        patch.setattr(each, "get_tp_group", lambda: alone)
    patch.setattr(module, "perf_counter", lambda: milliseconds() / 1e3)
    for name in ("Stream", "Event", "current_stream", "set_stream"):
        patch.setattr(torch.cuda, name, MagicMock())
    states = SimpleNamespace(
        num_speculative_steps=nodes,
        device=torch.device("cpu"),
        max_num_reqs=requests,
        req_id_to_index={str(slot): slot for slot in range(requests)},
        num_computed_tokens_np=np.full(requests, 10),
        prefill_len=SimpleNamespace(np=np.full(requests, 5)),
    )
    return module.TreeBudget(
        states,
        torch.zeros(requests + 1, dtype=torch.int32),
        1,
        rows,
        meter=StepTimer(torch.device("cpu")),
        lengths=lengths,
        trees=ScoredTrees(requests + 1, nodes, "cpu"),
        samples=np.zeros(requests, dtype=np.bool_),
    )
