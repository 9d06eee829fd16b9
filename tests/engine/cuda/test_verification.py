# SPDX-License-Identifier: Apache-2.0
"""Which nodes a step has accepted, and the caches whose rows it moves."""

import torch

from vllm_redrafter.engine.cuda.verification import Verification


def test_accepted_nodes_are_those_of_the_paths() -> None:
    step = Verification(3, 4, torch.device("cpu"))
    step.path[:] = torch.tensor([[0, 2, 3, -1, -1], [0, -1, -1, -1, -1], [0, 1, -1, -1, -1]])
    accepted = step.accepted(2)
    assert [row.nonzero().flatten().tolist() for row in accepted] == [[0, 2, 3], [0]]


def test_a_cache_that_layers_share_is_moved_once_and_caches_may_differ_in_shape() -> None:
    local, wide = (torch.zeros(3, 1, 32, 2 * size) for size in (256, 512))
    step = Verification(1, 4, torch.device("cpu"))
    step.use_caches(torch.zeros(1, 5), [[local, wide, local, wide, wide]])
    (tables,) = step._caches
    moved = sorted(table.bases.tolist() for table in tables)
    assert moved == sorted([[local.data_ptr()], [wide.data_ptr()]])
