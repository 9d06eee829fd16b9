# SPDX-License-Identifier: Apache-2.0
"""For `setup`: chains through vLLM's Triton attention, from recordings in place of CUDA graphs."""

from redrafter_testing.engines.interpreted_engine import use_triton_attention
from redrafter_testing.gpu import recorded_graphs


def use() -> None:
    recorded_graphs.use()
    use_triton_attention()


def use_without_trims() -> None:
    """The attention reads no batch that was trimmed on the device, as that of recurrent layers."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    use()
    TritonAttentionBackend.supports_device_cpu_query_lens_mismatch = classmethod(lambda cls: False)
