# SPDX-License-Identifier: Apache-2.0
"""Parts of vLLM that are not what is tested, by PyTorch, and what its CPU backend lacks."""

import importlib
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.utils.patching import patched


def use() -> None:
    """In this process; the engine has been made. Top-k and top-p fail under the interpreter, the KV
    cache's update and sampling are slow."""
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import sampler, states

    from vllm_redrafter.engine.v2 import one_pass_sampler

    topk_topp_sampler.HAS_TRITON = False
    triton_attn.triton_reshape_and_cache_flash = reshape_and_cache_flash
    sampler.gumbel_sample = _gumbel_sample
    vars(one_pass_sampler)["gumbel_sample"] = _gumbel_sample
    states.apply_temperature = _apply_temperature
    _share_experts()
    _use_triton_mamba()


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """vLLM's kernels of this name, Triton's and C++'s: rows whose slot is negative are left out."""
    slots = slot_mapping[slot_mapping >= 0]
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    at = (slots // key_cache.shape[1], slots % key_cache.shape[1])
    for cache, new, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        quantised = kv_cache_dtype.startswith("fp8")
        cache[at] = (new[rows] / scale if quantised else new[rows]).to(cache.dtype)


def _apply_temperature(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor) -> None:
    """Divides each row [vocabulary] of `logits` by its request's temperature, if that is not 0."""
    by = temperature[expanded_idx_mapping]
    logits /= torch.where(by == 0, 1, by).unsqueeze(1)


def _gumbel_sample(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    temperature: Tensor,
    seed: Tensor,
    pos: Tensor,
    apply_temperature: bool,
    **flags: bool,
) -> Tensor:
    """[rows] int64, by the logits, seeds and positions alone."""
    assert not any(flags.values()), flags
    if apply_temperature:
        logits = logits.to(torch.float32, copy=True)
        _apply_temperature(logits, expanded_idx_mapping, temperature)
    tokens = torch.arange(logits.shape[1])
    stream = _scrambled(seed[expanded_idx_mapping] + _scrambled(pos.long()))
    bits = _scrambled(stream.unsqueeze(1) + tokens) >> 32 & 0xFFFFFFFF
    noise = -(-((bits + 0.5) / 2.0**32).log()).log()
    sampled = (temperature[expanded_idx_mapping] > 0).unsqueeze(1)
    return torch.where(sampled, logits + noise, logits).argmax(dim=1)


def _scrambled(x: Tensor) -> Tensor:
    """SplitMix64's output for each state, int64."""
    x = x * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


def _use_triton_mamba() -> None:
    """As on a GPU: vLLM's code for CPUs computes speculative rows wrongly, its n-gram's too."""
    from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
    from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm, ssu_dispatch
    from vllm.platforms import current_platform

    with patched(type(current_platform), is_cpu=lambda self: False):
        importlib.reload(causal_conv1d)
        importlib.reload(mamba_ssm)
    mamba_mixer2.causal_conv1d_update = causal_conv1d.causal_conv1d_update
    short_conv.causal_conv1d_update = causal_conv1d.causal_conv1d_update
    short_conv.ShortConv.forward_native = short_conv.ShortConv.forward_cuda
    made = ssu_dispatch._mamba_ssu_backend
    if made is not None:
        ssu_dispatch._mamba_ssu_backend = ssu_dispatch.TritonSSUBackend(made._mamba_config)


def _share_experts() -> None:
    """Let this process's ranks have different experts, and gather each other's rows."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kernel = cpu_moe.CPUUnquantizedExperts.apply

    def apply(experts: Any, **inputs: Any) -> None:
        expert_map: Tensor | None = inputs["expert_map"]
        if expert_map is not None:
            chosen: Tensor = inputs["topk_ids"]
            own = expert_map[chosen.long()].to(chosen.dtype)
            inputs["topk_weights"] = inputs["topk_weights"].masked_fill(own < 0, 0.0)
            inputs |= {"topk_ids": own.clamp(min=0), "expert_map": None}
        kernel(experts, **inputs)

    cpu_moe.CPUUnquantizedExperts.apply = apply
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    ranks: Any, inputs: list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> list[Tensor]:
    """All ranks' rows, of which each has its own number."""
    assert dim == 0 and sizes is not None
    gathered = []
    for rows in inputs:
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=ranks.device_group)
        gathered.append(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))
    return gathered


def _reduce_scatterv(
    ranks: Any, rows: Tensor, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    """This rank's rows of the ranks' sum."""
    assert dim == 0 and sizes is not None
    summed = rows.clone()
    torch.distributed.all_reduce(summed, group=ranks.device_group)
    return summed.split(sizes)[ranks.rank_in_group]
