# SPDX-License-Identifier: Apache-2.0
"""Which head has which form on packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from vllm_redrafter.engine.cpu.heads.gated import PackedGatedHead
from vllm_redrafter.engine.cpu.heads.recurrent import PackedRecurrentHead
from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.head import DraftHead, Pack, Product, SearchHead
from vllm_redrafter.heads.recurrent import RecurrentHead
from vllm_redrafter.heads.selector import Selector

FORMS: Mapping[type[DraftHead], Callable[[Any, Pack], SearchHead]] = {
    GatedHead: PackedGatedHead,
    RecurrentHead: PackedRecurrentHead,
}
"""By the class itself: one derived from it may have other mathematics."""


def packed_form(head: DraftHead, pack: Pack) -> SearchHead:
    """The form of a head on products that `pack` makes.

    Of one that is not listed: what its `packed` brings, or else each linear layer packed.
    """
    form = FORMS.get(type(head))
    if form is not None:
        return form(head, pack)
    return head.packed(pack) or with_packed_layers(head, pack)


def with_packed_layers(head: DraftHead, pack: Pack) -> DraftHead:
    """The same head, with each linear layer replaced by its product.

    It keeps none of the head's matrices but those that candidates need: a selector's, and the
    vocabulary-wide layer's beside the packed ones, V E numbers.
    """
    # The weights themselves are not copied: at a large vocabulary they would be there twice.
    copy = deepcopy(head, {id(parameter): parameter for parameter in head.parameters()})
    replaced = [
        (module, name, child)
        for module in copy.modules()
        if not isinstance(module, Selector)
        for name, child in module.named_children()
        if isinstance(child, nn.Linear)
    ]
    gathered = copy.vocabulary_layers if head.config.selected_depths else ()
    for module, name, child in replaced:
        weight = child.weight if any(child is layer for layer in gathered) else None
        setattr(module, name, PackedLinear(pack(child.weight, child.bias), weight))
    return copy


class PackedLinear(nn.Module):
    """A linear layer whose weight is with its product; and here as well, where rows are needed."""

    def __init__(self, product: Product, weight: Tensor | None) -> None:
        super().__init__()
        self.product, self.weight = product, weight

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)
