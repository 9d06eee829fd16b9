# SPDX-License-Identifier: Apache-2.0
"""Which head has which form on packed weights."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from vllm_redrafter.engine.cpu.heads.gated import PackedGatedHead
from vllm_redrafter.engine.cpu.heads.recurrent import PackedRecurrentHead
from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.head import DraftHead, Pack, Product, SearchHead
from vllm_redrafter.heads.recurrent import RecurrentHead

_FORMS: Mapping[type[DraftHead], Callable[[Any, Pack], SearchHead]] = {
    GatedHead: PackedGatedHead,
    RecurrentHead: PackedRecurrentHead,
}
"""By the class itself: one derived from it may have other mathematics."""


def packed_form(head: DraftHead, pack: Pack) -> SearchHead:
    """A head on packed products: its class's form, that of its `packed`, or its layers packed.

    The head is used up: in the last case it is what is returned.
    """
    if (form := _FORMS.get(type(head))) is not None:
        return form(head, pack)
    return head.packed(pack) or _with_packed_layers(head, pack)


def _with_packed_layers(head: DraftHead, pack: Pack) -> DraftHead:
    """The head, with each linear layer replaced by its product.

    Only matrices that candidates need are kept: a selector's, and the vocabulary-wide layer's.
    """
    gathered = head.vocabulary_layer if head.config.selected_depths else None
    # By name: a list of layers would keep them, and all of them would be in memory twice.
    linear = [
        name
        for name, module in head.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear) and not name.startswith("selector.")
    ]
    for name in linear:
        layer: Any = head.get_submodule(name)
        weight: Tensor = layer.weight
        product = pack(weight, layer.bias)
        head.set_submodule(name, _PackedLinear(product, weight if layer is gathered else None))
    return head


class _PackedLinear(nn.Module):
    """A linear layer by its product; with its weight where rows of it are needed."""

    def __init__(self, product: Product, weight: Tensor | None) -> None:
        super().__init__()
        self.product, self.weight = product, weight

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)
