# SPDX-License-Identifier: Apache-2.0
"""A head in MLX in half precision and quantised; test_beam_search.py compares float32."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from torch import Tensor

from redrafter_testing.models.head_forms import FORMS, H, V, write_random
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.heads.gated import GatedConfig
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.heads.recurrent import RecurrentConfig
from vllm_redrafter.mlx.heads import Head, load_head
from vllm_redrafter.utils.errors import ConfigError


def read(folder: Path | str, dtype: mx.Dtype) -> Any:
    return load_head(Checkpoint.open(str(folder)), dtype)


def numbers(*shape: int) -> tuple[Tensor, mx.array]:
    """Random ones, for both libraries."""
    values = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values), mx.array(values)


def values(array: mx.array) -> Tensor:
    return torch.from_numpy(np.array(array.astype(mx.float32)))


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_is_near_and_stays_half(
    config: HeadConfig, dtype: mx.Dtype, tmp_path: Path
) -> None:
    expected = write_random(config, tmp_path)
    head = read(tmp_path, dtype)
    assert head.config == config
    torch_hidden, hidden = numbers(1, config.hidden_width)
    torch_embedded, embedded = numbers(1, H)
    hidden, embedded = hidden.astype(dtype), embedded.astype(dtype)
    condition = head.condition(hidden)
    state = head.advance(head.start(condition, embedded), embedded)
    logits = head.logits(condition, state)
    assert condition.dtype == state.dtype == logits.dtype == dtype
    torch_condition = expected.condition(torch_hidden)
    torch_state = expected.start(torch_condition, torch_embedded)
    torch_state = expected.advance(torch_state, torch_embedded, 1)
    torch_logits = expected.logits(torch_condition, torch_state, 1)
    error = (values(logits) - torch_logits).square().mean()
    assert error < 1e-3 * torch_logits.square().mean()
    # Unused tokens have embeddings of zeros.
    zeros = head.condition(mx.zeros_like(hidden))
    nothing = head.start(zeros, mx.zeros_like(embedded))
    nothing = head.advance(mx.zeros_like(nothing), mx.zeros_like(embedded))
    assert mx.isfinite(head.logits(zeros, nothing)).all()


@pytest.mark.parametrize(
    "config", [RecurrentConfig(V, 64, exit_dim=64), GatedConfig(V, 64)], ids=["recurrent", "gated"]
)
def test_a_head_can_be_quantised_as_a_target_is(config: HeadConfig, tmp_path: Path) -> None:
    write_random(config, tmp_path)
    head, expected = (read(tmp_path, mx.float32) for _ in range(2))
    nn.quantize(head, group_size=64, bits=8)

    def logits(of: Head) -> Tensor:
        hidden, embedded = numbers(1, 64)[1], numbers(1, 1, 64)[1][0]
        condition = of.condition(hidden)
        return values(of.logits(condition, of.start(condition, embedded)))

    error = (logits(head) - logits(expected)).square().mean()
    assert 0 < error < 1e-3 * logits(expected).square().mean()


@dataclass(frozen=True)
class OtherConfig(GatedConfig):
    """Of another package's head."""

    model_type: ClassVar[str] = "other_head"


def test_what_mlx_cannot_compute_is_refused(tmp_path: Path) -> None:
    write_random(GatedConfig(V, H), tmp_path)
    with pytest.raises(ConfigError, match=r"int8; load the target in one of .*bfloat16"):
        read(tmp_path, mx.int8)
    other = replace(Checkpoint.open(str(tmp_path)), head=OtherConfig(V, H))
    with pytest.raises(ConfigError, match=r"'other_head' does not run in MLX.*vLLM"):
        load_head(other, mx.float32)
