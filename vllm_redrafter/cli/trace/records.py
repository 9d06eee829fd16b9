# SPDX-License-Identifier: Apache-2.0
"""From an engine's recorded steps to what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_redrafter.drafting.recorder import RecordedNode, RecordedStep

Decode = Callable[[list[int]], str]


def page_records(
    prompt: str, answer: Sequence[int], steps: Sequence[RecordedStep], decode: Decode
) -> dict[str, Any]:
    """The page's data, as JSON has it.

    Args:
        prompt: as the user wrote it.
        answer: the tokens that vLLM returned; a last step may have had more of them.
        steps: that made it.
        decode: token ids to text.
    """
    records: list[dict[str, Any]] = []
    end = 0
    for step in steps:
        before, end = end, min(end + len(step.output_tokens), len(answer))
        if end == before:
            break
        records.append(
            {
                "tokens": end - before,
                "milliseconds": round(1e3 * step.seconds, 3),
                "before": decode(list(answer[:before])),
                "text": decode(list(answer[:end])),
                "nodes": [_node(node, decode) for node in step.nodes],
            }
        )
    return {"prompt": prompt, "steps": records}


def _node(node: RecordedNode, decode: Decode) -> dict[str, Any]:
    return {
        "text": decode([node.token]),
        "parent": node.parent,
        "depth": node.depth,
        "probability": None if node.probability is None else round(node.probability, 4),
        "match": node.match_length,
        "verified": node.verified,
        "accepted": node.accepted,
    }
