# SPDX-License-Identifier: Apache-2.0
"""What packed heads keep of the heads that they are made of, where these tell candidates."""

import gc
import weakref

import pytest

from vllm_redrafter.engine.cpu.heads.forms import packed_form
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.heads.selector import SelectorConfig

V, H, L = 300, 32, 3


@pytest.mark.parametrize("name", ["recurrent", "gated"])
def test_no_matrix_but_the_vocabulary_layers_is_kept_to_tell_candidates(name: str) -> None:
    plain = new_head(name, V, H, L, selector=SelectorConfig(L - 1, 8))
    weights = {n: weakref.ref(p) for n, p in plain.named_parameters() if p.dim() > 1}
    (layer,) = plain.vocabulary_layers
    vocabulary = {n for n, p in plain.named_parameters() if p is layer.weight}
    fast = packed_form(plain, packed)
    del plain, layer
    gc.collect()
    assert fast.config.selected_depths == L - 1
    assert {n for n, weight in weights.items() if weight() is not None} <= vocabulary
