# SPDX-License-Identifier: Apache-2.0
"""Tokens are those of vLLM's sampler, whose float32 copy of the logits is made where it must be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from vllm import SamplingParams, triton_utils
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu import buffer_utils

from redrafter_testing.gpu.triton_interpreter import import_interpreted, interpreted

GPU = "vllm.v1.worker.gpu.sample"
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(triton_utils, "triton", triton)
    patch.setattr(triton_utils, "tl", triton.language)
    import_interpreted(*(f"{GPU}.{name}" for name in ("gumbel", "min_p", "states", "sampler")))
import_interpreted("vllm_redrafter.engine.v2.one_pass_sampler")

from vllm.v1.worker.gpu.sample.sampler import Sampler  # noqa: E402

from vllm_redrafter.engine.v2.one_pass_sampler import OnePassSampler  # noqa: E402

TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.3, 0.6, 0.9, 2.0)
ROWS, VOCAB = 16, 2500


def sampled(own: bool, logits: torch.Tensor, **more: Any) -> tuple[Any, torch.Tensor]:
    """Two rows of each request; the last one's parameters are `more` as well."""
    lengths: Any = SimpleNamespace(np=torch.ones(8).numpy())
    requests: Any = SimpleNamespace(
        device=torch.device("cpu"), max_num_reqs=8, vocab_size=VOCAB, prompt_len=lengths
    )
    requests.all_token_ids = requests.prefill_len = requests.total_len = lengths
    config: Any = SimpleNamespace(reasoning_config=None)
    sampler = Sampler(config, 8, VOCAB, requests.device, requests)
    sampler = OnePassSampler(sampler) if own else sampler
    for slot, temperature in enumerate(TEMPERATURES):
        others = more if slot == 7 else {}
        sampler.add_request(slot, SamplingParams(temperature=temperature, seed=slot, **others))
    sampler.apply_staged_writes()
    slots = torch.arange(8)
    rows = slots.repeat_interleave(2).int()
    position, zeros = torch.arange(ROWS) * 7 + 3, torch.zeros(ROWS, dtype=torch.int32)
    args = rows, slots.int(), slots.numpy(), position, zeros, zeros, slots.numpy()
    with interpreted():
        return sampler.sample(logits, *args, return_logprobs=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", [{}, {"min_p": 0.2}])
def test_tokens_are_vllm_s(
    dtype: torch.dtype, more: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)
    torch.manual_seed(0)
    logits = (torch.randn(ROWS, VOCAB) * 4).to(dtype)
    expected, _ = sampled(False, logits.clone(), **more)
    tokens, drawn_from = sampled(True, logits, **more)
    assert tokens.tolist() == expected.tolist()
    assert (drawn_from is logits) == (not more)
