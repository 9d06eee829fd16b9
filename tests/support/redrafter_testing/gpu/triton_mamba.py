# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernels for the decoding rows of Mamba 2 and short convolutions.

vLLM's code for CPUs, which they replace, computes speculative rows wrongly: its own n-gram method
gets other answers, too. The kernels are those that GPUs run.
"""

import importlib

from vllm_redrafter.utils.patching import patched


def use() -> None:
    """In this process, from here on; the engine has been made."""
    from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
    from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm, ssu_dispatch
    from vllm.platforms import current_platform

    with patched(type(current_platform), "is_cpu", lambda self: False):
        importlib.reload(causal_conv1d)
        importlib.reload(mamba_ssm)
    mamba_mixer2.causal_conv1d_update = causal_conv1d.causal_conv1d_update
    short_conv.causal_conv1d_update = causal_conv1d.causal_conv1d_update
    short_conv.ShortConv.forward_native = short_conv.ShortConv.forward_cuda
    made = ssu_dispatch._mamba_ssu_backend
    if made is not None:
        ssu_dispatch._mamba_ssu_backend = ssu_dispatch.TritonSSUBackend(made._mamba_config)
