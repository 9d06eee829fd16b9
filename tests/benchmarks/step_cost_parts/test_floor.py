"""The least time of a step: bytes over bandwidth, or operations over rate."""

from __future__ import annotations

import pytest
from step_cost_parts.floor import Device, Weights, draft_launches, floors

TINY = {
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

TARGET = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8) + 8 + 100 * 8

LEVEL = (8 * 8 + 8) + (8 * 8 + 8) + 8 * 8 + (8 * 8 + 8) + 100 * 8  # input's half, block, w, u, head


def test_weights_are_those_that_a_step_multiplies_with() -> None:
    weights = Weights.of(TINY, None)
    assert weights == Weights(TARGET, LEVEL, once=8 * 8)
    tied = Weights.of({**TINY, "tie_word_embeddings": True}, None)
    assert tied.target == TARGET, "the table is multiplied with as the last layer"
    reduced = Weights.of(TINY, 10)
    assert reduced.per_level == LEVEL - 90 * 8


def test_a_head_in_fp8_is_half_to_read() -> None:
    device, weights = Device(bandwidth=1e3, rate=1e30), Weights.of(TINY, None, "fp8")
    assert weights == Weights(TARGET, LEVEL, once=64, in_fp8=100 * 8)
    (floor,) = floors(TINY, weights, device, (3, 4), [5], [(2, 10)])
    assert floor.draft == pytest.approx((4 * (2 * LEVEL - 100 * 8) + 2 * 64) / 1e3)


@pytest.mark.parametrize("bound", ["bandwidth", "rate"])
def test_a_floor_is_bytes_over_bandwidth_or_operations_over_rate(bound: str) -> None:
    fast, slow = 1e30, 1e3
    device = Device(
        bandwidth=slow if bound == "bandwidth" else fast, rate=slow if bound == "rate" else fast
    )
    weights = Weights(TARGET, LEVEL, once=64)
    (floor,) = floors(TINY, weights, device, (3, 4), [5], [(2, 10)])
    cache = 2 * 10 * 2 * 2 * 2 * 2 * 2  # requests, tokens, K and V, layers, heads, head size, bytes
    attention = 4 * 2 * 4 * 2 * 10  # layers, heads, head size, tokens
    if bound == "bandwidth":
        assert floor.plain == floor.verify == pytest.approx((2 * TARGET + cache) / slow)
        assert floor.draft == pytest.approx((4 * 2 * LEVEL + 2 * 64) / slow)
    else:
        assert floor.plain == pytest.approx(2 * (2 * TARGET + attention) / slow)
        assert floor.verify == pytest.approx(6 * floor.plain)
        assert floor.draft == pytest.approx((2 * LEVEL * (2 + 3 * 6) + 2 * 64 * 2) / slow)
    assert floor.ratio == pytest.approx((floor.verify + floor.draft) / floor.plain)


def test_a_draft_s_launches_come_on_top() -> None:
    device, weights = Device(bandwidth=1e3, rate=1e30), Weights(TARGET, LEVEL, once=64)
    (without,) = floors(TINY, weights, device, (3, 4), [5], [(2, 10)])
    (floor,) = floors(TINY, weights, device, (3, 4), [5], [(2, 10)], launches=7.0)
    assert floor.ratio == pytest.approx(without.ratio + 7.0 / floor.plain)
    assert draft_launches(5) == 38  # as tests/engine/cuda/test_graphs.py counts
