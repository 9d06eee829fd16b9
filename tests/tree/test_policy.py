# SPDX-License-Identifier: Apache-2.0
"""What to draft for a step; `test_token_tree.py` has which of the nodes may be in its tree."""

import pytest

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.tree.policy import search_shape


@pytest.mark.parametrize(("max_nodes", "shape"), [(4, (1, 4)), (5, (3, 5)), (12, (3, 5))])
def test_a_step_of_fewer_nodes_than_a_beam_is_long_drafts_the_best_beam_alone(
    max_nodes: int, shape: tuple[int, int]
) -> None:
    assert search_shape(ReDrafterConfig(12, beam_width=3, beam_length=5), max_nodes) == shape
