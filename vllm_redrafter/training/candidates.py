"""How many candidates a drafter needs: what fewer cost in tokens per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.training.batches import batches_by_length
from vllm_redrafter.training.estimate import Acceptance, replay
from vllm_redrafter.training.target import read_target

COUNTS = (32, 64, 128, 256, 512)
LOSS_ALLOWED = 0.005
"""Of the tokens per step that ranking the vocabulary at every level gives."""


def compare_candidates(
    drafter: DraftHead, target: Any, rows: TextRows, shape: ReDrafterConfig, batch_size: int = 8
) -> dict[int, Acceptance]:
    """Replay the decoding of target-written text with various numbers of candidates.

    Args:
        drafter: the draft head.
        target: the transformers model that wrote the text.
        rows: the text.
        shape: in which the drafter is served.
        batch_size: rows read by the target at once.

    Returns:
        By C, 0 for the whole draft vocabulary; nothing where the head tells no candidates for
        drafts of this length.
    """
    config = drafter.config
    if not 1 < shape.beam_length <= 1 + config.selected_depths:
        return {}
    counts = [c for c in COUNTS if shape.beam_width <= c < config.num_ranked_tokens]
    found = dict.fromkeys((0, *counts), Acceptance(0, 0))
    embed = target.get_input_embeddings()
    for batch in batches_by_length(rows, batch_size, embed.weight.device):
        outputs = read_target(target, batch, config.target_layers)
        for count in found:
            among = replace(shape, candidates=count)
            found[count] += replay(drafter, embed, outputs, batch, among)
    return found


def fewest(found: Mapping[int, Acceptance]) -> int:
    """The smallest C that loses no more than LOSS_ALLOWED; 0 where none does."""
    if not found:
        return 0
    least = (1 - LOSS_ALLOWED) * found[0].tokens_per_step
    enough = [count for count in found if count and found[count].tokens_per_step >= least]
    return min(enough, default=0)
