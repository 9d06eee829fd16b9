# SPDX-License-Identifier: Apache-2.0
"""A fused head is the plain one on h + F [the layers' outputs, normed], whichever head it is."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_redrafter.engine.cpu.heads.forms import packed_form
from vllm_redrafter.heads.registry import NAMES, new_head
from vllm_redrafter.tree.beam_search import beam_search

V, H, R, LAYERS = 11, 6, 3, (1, 3, 4)


def made(weight: Tensor, bias: Tensor | None) -> Any:
    return lambda x: F.linear(x, weight, bias)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_plain_head_on_the_fused_state(name: str) -> None:
    heads = []
    for fused in (LAYERS, ()):
        torch.manual_seed(0)
        new = new_head(name, V, H, target_layers=fused).eval()
        heads.append(new.double().requires_grad_(False))
    head, plain = heads
    assert head.fuse is not None
    torch.nn.init.normal_(head.fuse.weight)
    layers = [10**i * torch.randn(R, H, dtype=torch.float64) for i in range(len(LAYERS))]
    last = torch.randn(R, H, dtype=torch.float64)
    parts = head.fuse.weight.split(H, dim=1)
    normed = [x / x.square().mean(1, keepdim=True).sqrt() for x in layers]
    together = last + sum(x @ part.T for x, part in zip(normed, parts, strict=True))
    assert not torch.allclose(together, last)
    given = torch.cat([last, *layers], dim=-1)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    expected = plain.condition(together)
    close(head.condition(given), expected)
    # The gated head's packed form has the norm behind it, and both in float32.
    packed = packed_form(head, made).condition(given)[..., : expected.shape[-1]]
    close(packed.double(), expected)

    embed, roots = torch.nn.Embedding(V, H).double(), torch.arange(R)
    nodes = beam_search(plain, embed, together, roots, 4, 3)
    for form in (head, packed_form(head, made)):
        found = beam_search(form, embed, given, roots, 4, 3)
        assert torch.equal(found.tokens, nodes.tokens)
        close(found.log_probs, nodes.log_probs)
