# SPDX-License-Identifier: Apache-2.0
"""Which head has which form on packed weights."""

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

_FORMS: Mapping[type[DraftHead], Callable[[Any, Pack], SearchHead]] = {
    GatedHead: PackedGatedHead,
    RecurrentHead: PackedRecurrentHead,
}
"""By the class itself: one derived from it may have other mathematics."""


def packed_form(head: DraftHead, pack: Pack) -> SearchHead:
    """A head on packed products: its class's form, that of its `packed`, or its layers packed."""
    if (form := _FORMS.get(type(head))) is not None:
        return form(head, pack)
    return head.packed(pack) or _with_packed_layers(head, pack)


def _with_packed_layers(head: DraftHead, pack: Pack) -> DraftHead:
    """The same head, with each linear layer replaced by its product.

    Only matrices that candidates need are kept: a selector's, and the vocabulary-wide layer's.
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
    gathered = copy.vocabulary_layer if head.config.selected_depths else None
    for module, name, child in replaced:
        weight = child.weight if child is gathered else None
        setattr(module, name, _PackedLinear(pack(child.weight, child.bias), weight))
    return copy


class _PackedLinear(nn.Module):
    """A linear layer by its product; with its weight where rows of it are needed."""

    def __init__(self, product: Product, weight: Tensor | None) -> None:
        super().__init__()
        self.product, self.weight = product, weight

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)
