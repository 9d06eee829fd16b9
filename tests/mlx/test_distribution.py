# SPDX-License-Identifier: Apache-2.0
"""Sampled output has the target's distribution: the joint of three tokens; a biased rule's has not.

The first token comes from a plain step, the others from trees.
"""

from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

import mlx_lm
from mlx_lm.sample_utils import make_sampler
from scipy.stats import chisquare

from redrafter_testing.models.tiny_models import make_drafter, make_target
from vllm_redrafter.mlx import Drafter, load_drafter
from vllm_redrafter.mlx import step as steps
from vllm_redrafter.mlx.decoding import Decoder
from vllm_redrafter.mlx.sampling import NodeSampler
from vllm_redrafter.mlx.step import AcceptedPath, accept_path

VOCAB, TOKENS, SAMPLES = 4, 3, 1500
PROMPT = [2, 3, 1, 0, 3]
TEMPERATURE = 0.8
# A correct rule fails by chance once in a million runs; the biased one is far below.
SIGNIFICANCE = 1e-6


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    target = make_target(tmp_path_factory.mktemp("small"), vocab_size=VOCAB, seed=3)
    folder = make_drafter(tmp_path_factory.mktemp("drafter"), vocab_size=VOCAB)
    model, _ = mlx_lm.utils.load_model(Path(target))
    return load_drafter(str(folder), model, beam_width=3, beam_length=2, adaptive=False)


def sampled(drafter: Drafter) -> np.ndarray:
    """[V, V, V] counts of answers' first tokens; there is room for trees behind them."""
    counts = np.zeros((VOCAB,) * TOKENS)
    caches = drafter.target.make_cache()
    drafter.target.forward(mx.array(PROMPT[:-1]), caches)
    mx.random.seed(0)
    for _ in range(SAMPLES):
        sampler = NodeSampler(make_sampler(TEMPERATURE), None)
        answer = Decoder(drafter, caches, [], PROMPT, sampler).tokens(9)
        counts[tuple(token.id for token in islice(answer, TOKENS))] += 1
        answer.close()
        for cache in caches:
            cache.trim(cache.offset - len(PROMPT) + 1)
    return counts


def joint(drafter: Drafter) -> np.ndarray:
    """[V, V, V], the exact probabilities."""
    exact = np.ones((VOCAB,) * TOKENS)
    for sequence in product(range(VOCAB), repeat=TOKENS):
        tokens = mx.array([*PROMPT, *sequence[:-1]])
        logits = drafter.target.model(tokens[None])[0, len(PROMPT) - 1 :].astype(mx.float32)
        rows = np.array(mx.softmax(logits / TEMPERATURE, axis=-1), dtype=np.float64)
        exact[sequence] = np.prod([row[token] for row, token in zip(rows, sequence, strict=True)])
    return exact / exact.sum()


def p_value(counts: np.ndarray, exact: np.ndarray) -> float:
    """Of a chi-squared test; cells of which hardly any are expected count as one."""
    expected = exact.flatten() * counts.sum()
    few = expected < 10
    merged = [np.append(x.flatten()[~few], x.flatten()[few].sum()) for x in (counts, expected)]
    keep = merged[1] > 0
    return float(chisquare(merged[0][keep], merged[1][keep]).pvalue)


def test_three_tokens_are_distributed_as_the_target_s(drafter: Drafter) -> None:
    drafter.stats.reset()
    counts = sampled(drafter)
    assert drafter.stats.sampled_tokens > 1.2 * drafter.stats.verifications
    assert p_value(counts, joint(drafter)) > SIGNIFICANCE


def test_a_rule_that_accepts_more_is_found_out(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def biased(
        tokens: Any, parents: Any, depths: Any, sees: Any, drawn: Any, most: int
    ) -> AcceptedPath:
        """Of every other tree the first node is accepted, whatever was drawn."""
        if rng.random() < 0.5:
            drawn[0] = tokens[1]
        return accept_path(tokens, parents, depths, sees, drawn, most)

    monkeypatch.setattr(steps, "accept_path", biased)
    assert p_value(sampled(drafter), joint(drafter)) < SIGNIFICANCE
