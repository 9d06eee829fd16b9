# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform, whose devices are those that Ray calls GPUs.

vLLM finds it as a platform plug-in in every process that has this folder on PYTHONPATH. Ray's GPUs
are logical: a node has as many as it is said to have.
"""


def plugin():
    return "ray_platform.RayCpuPlatform"


def __getattr__(name):
    # Not while vLLM looks for its platform: its CPU platform imports what needs one.
    if name != "RayCpuPlatform":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform

    class RayCpuPlatform(CpuPlatform):
        ray_device_key = "GPU"

    globals()[name] = RayCpuPlatform
    return RayCpuPlatform
