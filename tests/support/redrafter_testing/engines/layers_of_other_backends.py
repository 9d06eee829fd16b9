# SPDX-License-Identifier: Apache-2.0
"""Llamas whose layers bring another attention backend, as some models' do; for `setup`."""

from functools import partial
from typing import Any

from redrafter_testing.oracles.oracle_v2 import schedule_asynchronously


def derived_backend_with_async_scheduling() -> None:
    """The second layer's backend is derived from ours. Steps are scheduled as on a GPU."""
    from vllm.model_executor.models import llama

    llama.Attention = partial(_with_derived_backend, llama.Attention)
    schedule_asynchronously()


def chunked_attention() -> None:
    """All layers are Llama 4's, which see chunks of 32 tokens."""
    from vllm.model_executor.layers.attention import ChunkedLocalAttention
    from vllm.model_executor.models import llama

    llama.Attention = partial(_chunked, ChunkedLocalAttention)


def _with_derived_backend(attention: Any, *args: Any, prefix: str, **kwargs: Any) -> Any:
    from vllm_redrafter.engine.cuda.attention import TreeAttentionBackend

    if ".1." in prefix:
        kwargs["attn_backend"] = type("OwnBackend", (TreeAttentionBackend,), {})
    return attention(*args, prefix=prefix, **kwargs)


def _chunked(attention: Any, *args: Any, **kwargs: Any) -> Any:
    for name in ("per_layer_sliding_window", "attn_type"):
        kwargs.pop(name, None)
    return attention(*args, attention_chunk_size=32, **kwargs)
