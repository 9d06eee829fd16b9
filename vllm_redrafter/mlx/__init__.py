# SPDX-License-Identifier: Apache-2.0
"""ReDrafter on Apple silicon, in MLX: trees on mlx-lm's unmodified models."""

from vllm_redrafter.mlx.drafter import Drafter, load_drafter
from vllm_redrafter.mlx.generation import stream_generate

__all__ = ["Drafter", "load_drafter", "stream_generate"]
