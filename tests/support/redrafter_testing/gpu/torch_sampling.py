# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampling from logits by torch: one program per token is slow under the interpreter."""

import torch
from torch import Tensor


def use() -> None:
    """In this process, where Model Runner V2 samples."""
    from vllm.v1.worker.gpu.sample import sampler, states

    sampler.gumbel_sample = gumbel_sample
    states.apply_temperature = apply_temperature


def apply_temperature(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor) -> None:
    """Divides each row [vocabulary] of `logits` by its request's temperature, if that is not 0."""
    by = temperature[expanded_idx_mapping]
    logits /= torch.where(by == 0, 1, by).unsqueeze(1)


def gumbel_sample(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    temperature: Tensor,
    seed: Tensor,
    pos: Tensor,
    **flags: bool,
) -> Tensor:
    """[rows] int64, tokens that depend on the logits, the requests' seeds and the positions alone.

    Logits [rows, vocabulary] are divided by the temperature already; no flag is set.
    """
    assert not any(flags.values()), flags
    tokens = torch.arange(logits.shape[1])
    stream = scrambled(seed[expanded_idx_mapping] + scrambled(pos.long()))
    bits = scrambled(stream.unsqueeze(1) + tokens) >> 32 & 0xFFFFFFFF
    noise = -(-((bits + 0.5) / 2.0**32).log()).log()
    sampled = (temperature[expanded_idx_mapping] > 0).unsqueeze(1)
    return torch.where(sampled, logits + noise, logits).argmax(dim=1)


def scrambled(x: Tensor) -> Tensor:
    """SplitMix64's output for each state, int64."""
    x = x * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)
