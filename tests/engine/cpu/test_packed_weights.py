# SPDX-License-Identifier: Apache-2.0
"""Products on packed weights are torch's."""

import torch

from vllm_redrafter.engine.cpu.packed_weights import packed


def test_a_product_keeps_leading_dimensions() -> None:
    weight, bias, x = torch.randn(7, 5), torch.randn(7), torch.randn(2, 3, 5)
    torch.testing.assert_close(packed(weight, bias)(x), torch.nn.functional.linear(x, weight, bias))
