# SPDX-License-Identifier: Apache-2.0
"""What dummy runs read of a target that takes embeddings."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_redrafter.engine.cuda.model_state import TreeModelState


@pytest.mark.parametrize("is_profiling", [True, False])
def test_costs_are_measured_with_the_embeddings_of_different_tokens(is_profiling: bool) -> None:
    table = torch.randn(50, 4)
    state: Any = object.__new__(TreeModelState)
    vars(state).update(
        table=SimpleNamespace(budget=SimpleNamespace(is_profiling=is_profiling)),
        supports_mm_inputs=True,
        encoder_runner=SimpleNamespace(inputs_embeds=torch.zeros(64, 4)),
        model_config=SimpleNamespace(get_vocab_size=lambda: 50),
        model=SimpleNamespace(embed_input_ids=table.__getitem__),
        device=torch.device("cpu"),
    )
    embeds = state.dummy_inputs_embeds(32)
    assert embeds.data_ptr() == state.encoder_runner.inputs_embeds.data_ptr(), "graphs read it"
    assert (embeds.unique(dim=0).shape[0] > 16) == is_profiling
