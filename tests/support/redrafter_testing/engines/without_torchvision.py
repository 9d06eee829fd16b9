# SPDX-License-Identifier: Apache-2.0
"""vLLM's targets that see images, where torchvision is missing.

vLLM imports their image processors' modules, which import torchvision at once; the processors that
transformers then chooses work with Pillow. For videos there is none without torchvision.
"""

import sys
from importlib.util import find_spec
from types import ModuleType


def let_vision_targets_load() -> None:
    """For the engine's process: empty modules in place of those that are imported."""
    if find_spec("torchvision") is not None:
        return
    from transformers import processing_utils
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from vllm.model_executor.models import registry

    parts = "torchvision", "transforms", "v2", "functional"
    *packages, functional = (ModuleType(".".join(parts[: n + 1])) for n in range(len(parts)))
    sys.modules.update({module.__name__: module for module in (*packages, functional)})
    functional.InterpolationMode = object  # named in annotations
    packages[-1].functional = functional

    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_processing_utils import VideoProcessorMixin

    # A processor cannot be made without one for videos.
    processing_utils.transformers_module.VideoProcessorMixin = VideoProcessorMixin
    AutoVideoProcessor.from_pretrained = lambda *_, **__: Qwen2VLVideoProcessor()
    # The class is looked at in a process of its own, which would lack these modules.
    registry._run_in_subprocess = lambda look: look()
