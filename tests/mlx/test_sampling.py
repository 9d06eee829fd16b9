# SPDX-License-Identifier: Apache-2.0
"""Tokens at nodes: noise of the position alone, and logits processors along a chain."""

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler
from scipy.stats import chisquare

from vllm_redrafter.mlx.sampling import NodeSampler

V = 50
NONE = mx.array([], mx.uint32)


def logits(rows: int, seed: int = 0) -> mx.array:
    return mx.random.normal((rows, V), key=mx.random.key(seed))


def drawn(sampler: NodeSampler, rows: mx.array, positions: list[int]) -> list[int]:
    return sampler.sample(rows, positions, NONE, mx.zeros(len(positions), mx.int32))[0].tolist()


def seeded(seed: int) -> NodeSampler:
    mx.random.seed(seed)
    return NodeSampler(make_sampler(1.0, top_p=0.9), None)


def test_a_node_s_token_does_not_depend_on_the_other_nodes() -> None:
    rows, positions = logits(20), [*range(30, 50)]
    sampler = seeded(1)
    together = drawn(sampler, rows, positions)
    assert together == [drawn(sampler, rows[i][None], [positions[i]])[0] for i in range(20)]
    assert together == drawn(seeded(1), rows, positions)


def test_tokens_of_many_positions_are_distributed_as_the_target_s() -> None:
    """With the walk's exact enumeration, answers are; a seed gives the same one with any draft."""
    mx.random.seed(0)
    sampler, count = NodeSampler(make_sampler(0.8), None), 5000
    rows = logits(1)
    tokens = drawn(sampler, mx.broadcast_to(rows, (count, V)), [*range(count)])
    probabilities = np.array(mx.softmax(rows[0] / 0.8), np.float64)
    counts, expected = np.bincount(tokens, minlength=V), count * probabilities
    assert chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-6
    assert chisquare(counts).pvalue < 1e-6


def test_greedy_sampling_takes_the_most_probable_and_draws_nothing() -> None:
    mx.random.seed(4)
    before = mx.random.state[0].tolist()
    for sampler in (NodeSampler(None, None), NodeSampler(make_sampler(0.0), None)):
        assert sampler.is_greedy
        rows = logits(9)
        assert drawn(sampler, rows, [0] * 9) == rows.argmax(axis=-1).tolist()
    assert mx.random.state[0].tolist() == before


def test_processors_see_the_text_up_to_a_node() -> None:
    seen = []

    def forbid_last(tokens: mx.array, row: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        row[:, tokens[-1:]] = -mx.inf
        return row

    sampler = NodeSampler(None, [forbid_last])
    rows, nodes = logits(3), logits(3).argmax(axis=-1)
    tokens, logprobs = sampler.sample(rows, [2, 3, 4], mx.array([8, 9], mx.uint32), nodes)
    chain = nodes.tolist()
    assert sampler.needs_chain
    assert seen == [[8, 9, *chain[: i + 1]] for i in range(3)]
    assert all(token != node for token, node in zip(tokens.tolist(), chain, strict=True))
    assert mx.allclose(mx.exp(logprobs).sum(axis=-1), mx.ones(3))
