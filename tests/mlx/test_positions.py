# SPDX-License-Identifier: Apache-2.0
"""Ropes with a position for each token."""

import pytest

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

from vllm_redrafter.mlx.taps import take_positions

POSITIONS = [9, 10, 10, 11, 11]


class Layer(nn.Module):
    """A module that has a rope, and takes an offset itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = nn.RoPE(8)

    def __call__(self, x, offset=0):  # type: ignore[no-untyped-def]
        return self.rope(x, offset=offset)


@pytest.fixture
def layer() -> Layer:
    layer = Layer()
    take_positions(layer)
    return layer


@pytest.mark.parametrize("heads", [1, 2])
def test_each_token_is_turned_to_its_position(layer: Layer, heads: int) -> None:
    x = mx.random.normal((1, heads, len(POSITIONS), 8))
    turned = layer(x, mx.array(POSITIONS))
    assert turned.shape == x.shape
    for token, position in enumerate(POSITIONS):
        alone = nn.RoPE(8)(x[:, :, token : token + 1], offset=position)
        assert mx.allclose(turned[:, :, token : token + 1], alone, atol=1e-6)


def test_other_offsets_mean_what_they_did(layer: Layer) -> None:
    x, plain = mx.random.normal((3, 2, 5, 8)), nn.RoPE(8)
    assert mx.array_equal(layer.rope(x), plain(x))
    for offset in 4, mx.array(4), mx.array([1, 5, 7]):
        assert mx.array_equal(layer(x, offset), plain(x, offset=offset))
