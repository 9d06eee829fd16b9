# SPDX-License-Identifier: Apache-2.0
"""Published speculators in few launches on a GPU: `heads/speculators.py`.

With V and the search's three, a level is six launches: a product, and one for all behind it.
"""

from torch import Tensor, nn

from vllm_redrafter.engine.v2.heads.selector import FusedSelector
from vllm_redrafter.heads.fused_head import Features, Level
from vllm_redrafter.heads.speculators import EPSILON, LstmSpeculator, MlpSpeculator, of_depth
from vllm_redrafter.triton_kernels.draft_layers import MAX_ROWS
from vllm_redrafter.triton_kernels.gated_layer import Rows
from vllm_redrafter.triton_kernels.speculator_cell import speculator_cell


class FusedSpeculator:
    """A `FusedHead`. Weights are read where the head has them at each call."""

    def __init__(self, head: MlpSpeculator | LstmSpeculator, max_rows: int, length: int) -> None:
        self._head = head
        self.max_rows = max_rows if head.selector is None else min(max_rows, MAX_ROWS)
        self.selector = FusedSelector.of(head.selector, length, self.max_rows)

    def step(self, level: Level) -> Tensor:
        head, width = self._head, self._head.config.width
        condition, above, embedded, parents, depth = level
        if above is not None:
            condition = of_depth(head.proj, depth)(above[:, :width])
        norms: list[nn.Module]
        if isinstance(head, LstmSpeculator):
            norms = [head.cell_ln, head.state_ln]
        else:
            norms = [of_depth(head.ln, depth)]
        return speculator_cell(
            Rows(*embedded),
            condition,
            None if above is None else Rows(above, parents),
            [part for norm in norms for part in norm.parameters()],
            condition.new_empty(len(parents), len(norms) * width),
            head.config.alpha,
            EPSILON,
        )

    def features(self, condition: Tensor, state: Tensor) -> Features:
        return Features(self._head.features(condition, state))
