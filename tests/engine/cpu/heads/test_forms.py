# SPDX-License-Identifier: Apache-2.0
"""Heads of other packages bring their forms on packed weights themselves."""

import torch
from torch import nn

from vllm_redrafter.engine.cpu.heads.forms import packed_form
from vllm_redrafter.engine.cpu.heads.gated import PackedGatedHead
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.heads.gated import GatedConfig, GatedHead
from vllm_redrafter.heads.head import Pack, SearchHead

CONFIG = GatedConfig(300, 32)


class Bringing(GatedHead):
    """Brings a form."""

    def packed(self, pack: Pack) -> SearchHead:
        return PackedGatedHead(self, pack)


class Doubled(GatedHead):
    """Derived from a head that has a form, with other mathematics."""

    def start(self, condition: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return super().start(condition, 2 * embedded)


def test_a_form_that_a_head_brings_is_used() -> None:
    assert isinstance(packed_form(Bringing(CONFIG), packed), PackedGatedHead)


def test_a_derived_head_keeps_its_own_mathematics_on_packed_layers() -> None:
    plain = Doubled(CONFIG).requires_grad_(False)
    fast, (condition, embedded) = packed_form(plain, packed), torch.randn(2, 3, 1, 32)
    torch.testing.assert_close(fast.start(condition, embedded), plain.start(condition, embedded))
    assert not any(isinstance(module, nn.Linear) for module in fast.modules())
