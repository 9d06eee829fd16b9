"""What in a model's structure stands against trees: its caches say most of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache


def obstacles(model: nn.Module) -> Iterator[str]:
    """Why no tree can be verified on this model; nothing where it may be.

    Args:
        model: of mlx-lm.
    """
    if (processes := mx.distributed.init().size()) > 1:
        yield f"it is spread over {processes} processes, and a tree is verified by one"
    others = Counter(
        type(cache).__name__
        for cache in make_prompt_cache(model)
        # A class derived from these may keep or read its rows in another way.
        if type(cache) not in (KVCache, RotatingKVCache)
    )
    for name, count in others.items():
        yield f"{count} of its caches are of mlx-lm's {name}, and a tree needs rows of K and V"
    if any(getattr(module, "block_sparse", False) for module in model.modules()):
        yield "its attention is to blocks of rows (block_sparse), and nodes lie in rows by number"


def windows(model: nn.Module) -> list[int | None]:
    """By cache, how many positions a token sees, its own counted; None for all.

    Args:
        model: one without obstacles.
    """
    return [getattr(cache, "max_size", None) for cache in make_prompt_cache(model)]
