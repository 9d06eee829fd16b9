# SPDX-License-Identifier: Apache-2.0
"""The sampler that stands in for vLLM's under the interpreter has the logits' distribution."""

import pytest
import torch
from scipy.stats import chisquare

from redrafter_testing.gpu.torch_sampling import apply_temperature, gumbel_sample

ROWS, VOCAB = 20_000, 12


@pytest.mark.parametrize("varied", ["seed", "pos"])
def test_tokens_have_the_distribution_whatever_is_varied(varied: str) -> None:
    torch.manual_seed(0)
    logits, temperature = torch.randn(VOCAB), torch.tensor([0.5]).expand(ROWS)
    fixed, counted = torch.full((ROWS,), 7), torch.arange(ROWS)
    requests, rows = torch.arange(ROWS), logits.expand(ROWS, VOCAB).clone()
    apply_temperature(rows, requests, temperature)
    seed, pos = (counted, fixed) if varied == "seed" else (fixed, counted)
    tokens = gumbel_sample(rows, requests, temperature, seed, pos, is_drafting=False)
    assert tokens.equal(gumbel_sample(rows, requests, temperature, seed, pos))
    expected = (logits / 0.5).softmax(-1).double()
    observed = tokens.bincount(minlength=VOCAB)
    assert chisquare(observed, expected / expected.sum() * ROWS).pvalue > 1e-3


def test_temperature_0_takes_the_most_probable_token() -> None:
    logits = torch.randn(5, VOCAB)
    requests, zeros = torch.arange(5), torch.zeros(5)
    tokens = gumbel_sample(logits, requests, zeros, torch.arange(5), torch.arange(5))
    assert tokens.equal(logits.argmax(dim=1))
