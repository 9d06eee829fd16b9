"""Captured hidden states against those that transformers computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm_redrafter.data.hidden_states import StoredStates
from vllm_redrafter.training.target import hidden_states, load_target
from vllm_redrafter.utils.errors import TrainingError

TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
"""How far a row may be from transformers', as a share of its length. Two ways to add up the same
16-bit numbers are some hundredths apart after many layers; states of another layer, of another
token, or without the norm, are as far apart as they are long."""


@torch.no_grad()
def check_rows(target: str, states: StoredStates, rows: Mapping[int, Sequence[int]]) -> float:
    """Run the target over some rows with transformers, and compare.

    It is loaded in the dtype of the states, over all GPUs that there are.

    Args:
        target: folder or hub id.
        states: what was captured.
        rows: by number, their tokens.

    Returns:
        The largest distance of a row, |captured - computed| / |computed|.

    Raises:
        TrainingError: a row is further apart than rounding can explain.
    """
    dtype = states.info.dtype
    model = load_target(target, getattr(torch, dtype), "auto")
    layers, largest = states.info.target_layers, 0.0
    for row, tokens in rows.items():
        captured = states[row].float()
        read = torch.tensor([tokens[: len(captured)]], device=model.device)
        computed = hidden_states(model, layers, input_ids=read)[0].float().cpu()
        # Layer by layer: the last ones' numbers may be far larger than the first ones'.
        by_layer = (x.view(len(x), 1 + len(layers), -1) for x in (captured - computed, computed))
        difference, whole = (x.norm(dim=(0, 2)) for x in by_layer)
        apart = float((difference / whole).max())
        # Written so that NaN is refused too.
        if not apart <= TOLERANCE[dtype]:
            raise TrainingError(
                f"{states.folder}: row {row} is {apart:.1%} of its length from what transformers "
                f"computes, and rounding in {dtype} explains {TOLERANCE[dtype]:.1%}: these hidden "
                "states are not the target's; train without --hidden-states, and report the "
                "target's class"
            )
        largest = max(largest, apart)
    return largest
