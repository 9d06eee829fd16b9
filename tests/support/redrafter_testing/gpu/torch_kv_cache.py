# SPDX-License-Identifier: Apache-2.0
"""A step's K and V written into the paged cache by torch, where no kernel can or shall do it."""

from torch import Tensor


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
