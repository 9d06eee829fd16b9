"""Llamas whose layers bring another attention backend, as some models' do; for `setup`."""

from __future__ import annotations

from functools import partial
from typing import Any


def own_backend() -> None:
    """The second layer brings its own, which nothing of ours has touched."""
    from vllm.model_executor.models import llama

    llama.Attention = partial(_with_own_backend, llama.Attention)


def chunked_attention() -> None:
    """All layers are Llama 4's, which see chunks of 32 tokens."""
    from vllm.model_executor.layers.attention import ChunkedLocalAttention
    from vllm.model_executor.models import llama

    llama.Attention = partial(_chunked, ChunkedLocalAttention)


def _with_own_backend(attention: Any, *args: Any, prefix: str, **kwargs: Any) -> Any:
    if ".1." in prefix:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        class OwnBackend(CPUAttentionBackend):
            pass

        kwargs["attn_backend"] = OwnBackend
    return attention(*args, prefix=prefix, **kwargs)


def _chunked(attention: Any, *args: Any, **kwargs: Any) -> Any:
    for name in ("per_layer_sliding_window", "attn_type"):
        kwargs.pop(name, None)
    return attention(*args, attention_chunk_size=32, **kwargs)
