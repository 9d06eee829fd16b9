# SPDX-License-Identifier: Apache-2.0
"""The defaults on CUDA: our worker and attention, Model Runner V2, graphs, async scheduling.

As a program, with a target and a drafter, it prints the settings that the engine depends on. Only
what a GPU or its libraries would have said to vLLM's platform is made up; nothing is run.
"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

from vllm_redrafter.utils import names


def test_what_a_user_gets_by_default(few_tokens_target: Path, few_tokens_drafter: Path) -> None:
    command = [sys.executable, "-P", __file__, str(few_tokens_target), str(few_tokens_drafter)]
    compiles = os.environ | {"TORCH_COMPILE_DISABLE": "0"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=compiles)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {1, 2, 4, 8, 9, 18, 36} <= set(found.pop("sizes"))
    assert found == {
        "worker": names.V2_WORKER,
        "attention": "CUSTOM",
        "model_runner_v2": True,
        "asynchronous": True,
        "graphs": "FULL_AND_PIECEWISE",
    }


def pretend_an_h200() -> None:
    """Make vLLM's CUDA platform the current one, with one H200."""
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("of the CUDA build")
    import vllm.config.vllm
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    made_up = {
        "get_device_capability": DeviceCapability(9, 0),
        "get_device_name": "made up",
        "get_device_total_memory": 141 << 30,
        "device_count": 1,
    }
    for name, value in made_up.items():
        setattr(NonNvmlCudaPlatform, name, classmethod(lambda cls, device_id=0, value=value: value))
    vllm.platforms._current_platform = NonNvmlCudaPlatform()
    vllm.config.vllm.HAS_TRITON = True


def print_settings(target: str, drafter: str) -> None:
    pretend_an_h200()
    from vllm.engine.arg_utils import EngineArgs

    from vllm_redrafter import plugin

    plugin.register()
    speculative = {"model": drafter, "num_speculative_tokens": 8}
    arguments = EngineArgs(target, speculative_config=speculative, skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    compilation = config.compilation_config
    settings = {
        "worker": config.parallel_config.worker_cls,
        "attention": config.attention_config.backend.name,
        "model_runner_v2": config.use_v2_model_runner,
        "asynchronous": config.scheduler_config.async_scheduling,
        "graphs": compilation.cudagraph_mode.name,
        "sizes": compilation.cudagraph_capture_sizes,
    }
    print(json.dumps(settings))


if __name__ == "__main__":
    print_settings(*sys.argv[1:])
