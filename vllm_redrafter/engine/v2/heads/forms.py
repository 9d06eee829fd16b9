# SPDX-License-Identifier: Apache-2.0
"""Which head has which form in few launches."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_redrafter.engine.v2.heads.gated import FusedGatedHead
from vllm_redrafter.engine.v2.heads.recurrent import FusedRecurrentHead
from vllm_redrafter.engine.v2.heads.speculators import FusedSpeculator
from vllm_redrafter.heads.fused_head import FusedHead
from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.recurrent import RecurrentHead
from vllm_redrafter.heads.speculators import LstmSpeculator, MlpSpeculator, SpeculatorConfig
from vllm_redrafter.triton_kernels.speculator_cell import WIDEST

FORMS: Mapping[type[DraftHead], Callable[[Any, int, int], FusedHead]] = {
    GatedHead: FusedGatedHead,
    LstmSpeculator: FusedSpeculator,
    MlpSpeculator: FusedSpeculator,
    RecurrentHead: FusedRecurrentHead,
}
"""By the class itself: one derived from it may have other mathematics."""


def fused_form(head: DraftHead, max_rows: int, length: int) -> FusedHead | None:
    """A head's fused form; that of a head outside of FORMS is what its `launches` returns."""
    form, config = FORMS.get(type(head)), head.config
    too_wide = isinstance(config, SpeculatorConfig) and config.width > WIDEST
    if form is None or too_wide or (isinstance(head, RecurrentHead) and not head.config.rnn):
        return head.launches(max_rows, length)
    return form(head, max_rows, length)
