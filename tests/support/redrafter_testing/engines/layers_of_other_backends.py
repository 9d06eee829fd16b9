# SPDX-License-Identifier: Apache-2.0
"""Llamas whose layers bring another attention backend, as some models' do; for `setup`."""

from functools import partial
from typing import Any


def derived_backend() -> None:
    """The second layer's backend is derived from ours."""
    from vllm.model_executor.models import llama

    llama.Attention = partial(_with_derived_backend, llama.Attention)


def _with_derived_backend(attention: Any, *args: Any, prefix: str, **kwargs: Any) -> Any:
    from vllm_redrafter.engine.v2.attention import TreeAttentionBackend

    if ".1." in prefix:
        kwargs["attn_backend"] = type("OwnBackend", (TreeAttentionBackend,), {})
    return attention(*args, prefix=prefix, **kwargs)


def chunked_attention() -> None:
    """All layers are Llama 4's, which see chunks of 32 tokens."""
    from vllm.model_executor.layers.attention import ChunkedLocalAttention
    from vllm.model_executor.models import llama

    def chunked(*args: Any, **kwargs: Any) -> Any:
        for name in ("per_layer_sliding_window", "attn_type"):
            kwargs.pop(name, None)
        return ChunkedLocalAttention(*args, attention_chunk_size=32, **kwargs)

    llama.Attention = chunked
