# SPDX-License-Identifier: Apache-2.0
"""The target's lower layers, for drafters that read them: vLLM's interface for EAGLE-3's heads."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import SupportsEagle3, supports_eagle3

from vllm_redrafter.utils.errors import ConfigError


def enable_aux_hidden_states(target: nn.Module, layers: Sequence[int]) -> None:
    """Let the target, not yet compiled, return these layers' outputs with each pass.

    ConfigError: its class does not do that.
    """
    if not supports_eagle3(target):
        raise ConfigError(
            f"the drafter reads layers {', '.join(map(str, layers))} of the target, and vLLM's "
            f"{type(target).__name__} does not hand out hidden states of its layers (it is no "
            "SupportsEagle3): use a drafter that was trained with --target-layers none, or leave "
            "the speculative config out"
        )
    cast(SupportsEagle3, target).set_aux_hidden_state_layers(tuple(layers))


def gathered(states: Sequence[Tensor], rows: Tensor) -> Tensor:
    """[R, (1 + n) H], what R drafts start from: rows [R] of 1 + n states [.., H]."""
    return torch.cat([state.index_select(0, rows) for state in states], dim=1)
