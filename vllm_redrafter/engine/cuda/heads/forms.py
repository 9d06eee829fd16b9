# SPDX-License-Identifier: Apache-2.0
"""Which head has which form in few launches."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_redrafter.engine.cuda.heads.gated import FusedGatedHead
from vllm_redrafter.engine.cuda.heads.recurrent import FusedRecurrentHead
from vllm_redrafter.heads.fused_head import FusedHead
from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.recurrent import RecurrentHead

FORMS: Mapping[type[DraftHead], Callable[[Any, int, int], FusedHead]] = {
    GatedHead: FusedGatedHead,
    RecurrentHead: FusedRecurrentHead,
}
"""By the class itself: one derived from it may have other mathematics."""


def fused_form(head: DraftHead, max_rows: int, length: int) -> FusedHead | None:
    """A head's fused form; that of a head outside of FORMS is what its `launches` returns."""
    form = FORMS.get(type(head))
    if form is None or (isinstance(head, RecurrentHead) and not head.config.rnn):
        return head.launches(max_rows, length)
    return form(head, max_rows, length)
