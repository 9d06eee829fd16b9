"""K by batch size on the CPU engine: constant, where the user has not chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def apply_default_schedule(vllm_config: VllmConfig) -> None:
    """Say that K is the same for all batches.

    Without a schedule, vLLM's scheduler pads a request whose prompt is cached but for a token to K
    draft tokens. CUDA graphs need steps of equal sizes; here these rows would be read for nothing.
    """
    speculative = vllm_config.speculative_config
    assert speculative is not None
    if speculative.num_speculative_tokens_per_batch_size is None:
        # From one request on.
        schedule = [(1, 1, vllm_config.num_speculative_tokens)]
        speculative.num_speculative_tokens_per_batch_size = schedule
