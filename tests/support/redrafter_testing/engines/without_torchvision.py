"""vLLM's vision targets where torchvision is missing: Pillow reads images instead.

vLLM imports modules of transformers that import torchvision, though not to work with it.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def let_vision_targets_load() -> None:
    """Put an empty module in its place, where it is not installed; there is no video then."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers import processing_utils
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from vllm.model_executor.models import registry

    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        sys.modules[name] = ModuleType(name)
    functional = ModuleType("torchvision.transforms.v2.functional")
    sys.modules[functional.__name__] = functional
    sys.modules["torchvision.transforms.v2"].functional = functional
    # Else a process that lacks these modules would import the class.
    registry._run_in_subprocess = lambda function: function()

    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_processing_utils import VideoProcessorMixin

    processing_utils.transformers_module.VideoProcessorMixin = VideoProcessorMixin
    AutoVideoProcessor.from_pretrained = lambda *_, **__: Qwen2VLVideoProcessor()
