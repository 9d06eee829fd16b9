"""A small case and made-up results, for the tests of benchmarks/tree_attention.py."""

from __future__ import annotations

import torch
from tree_attention_parts.cases import Case, Heads, TreeShape
from tree_attention_parts.report import AttentionResult

TINY = Heads("tiny", query=4, kv=2, dim=64)

CPU = torch.device("cpu")


def tiny(nodes: str, batch: int = 2, context: int = 20) -> Case:
    return Case(TINY, batch, context, TreeShape.parse(nodes), dtype=torch.float16)


COPY = 4000.0

KEPT = AttentionResult(
    heads="llama-3-8b",
    batch=8,
    context=4096,
    nodes="32",
    rows=256,
    leaves=130,
    floor_bytes=360_000_000,
    tree=100.0,
    one_node=95.0,
    beams=450.0,
)
