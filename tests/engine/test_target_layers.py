# SPDX-License-Identifier: Apache-2.0
"""Targets that hand out hidden states of their layers, and those that do not."""

import pytest
import torch
from torch import nn
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3

from vllm_redrafter.engine.target_layers import enable_aux_hidden_states, gathered
from vllm_redrafter.utils.errors import ConfigError


class Layers(nn.Module, EagleModelMixin):
    pass


class Willing(nn.Module, SupportsEagle3):
    def __init__(self) -> None:
        super().__init__()
        self.model = Layers()


def test_a_target_is_given_the_layers_or_refused_by_its_class() -> None:
    target = Willing()
    enable_aux_hidden_states(target, (2, 15, 27))
    assert target.model.aux_hidden_state_layers == (2, 15, 27)
    with pytest.raises(
        ConfigError, match=r"layers 2, 15 of the target, and vLLM's Module does not .* trained"
    ):
        enable_aux_hidden_states(nn.Module(), (2, 15))


def test_rows_of_all_states_are_gathered_side_by_side() -> None:
    states = [torch.arange(12.0).view(4, 3) + 100 * i for i in range(3)]
    found = gathered(states, torch.tensor([3, 1]))
    expected = [9.0, 10, 11, 109, 110, 111, 209, 210, 211]
    assert found.tolist() == [expected, [x - 6 for x in expected]]
