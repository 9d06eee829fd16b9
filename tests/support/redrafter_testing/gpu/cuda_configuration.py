# SPDX-License-Identifier: Apache-2.0
"""What vLLM makes of a configuration on CUDA, asked of its CUDA platform without a GPU.

cuda_configuration.py TARGET DRAFTER prints, as JSON, the settings that the engine depends on.
Only what a GPU or its libraries would have told vLLM's platform is made up; nothing is run.
"""

import json
import sys
import types


def pretend_a_gpu(capability: tuple[int, int]) -> None:
    """Make vLLM's CUDA platform the current one, with one H200 if the capability is (9, 0)."""
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("of the CUDA build")
    import vllm.config.vllm
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    told = {
        "get_device_capability": DeviceCapability(*capability),
        "get_device_name": "made up",
        "get_device_total_memory": 141 << 30,
        "device_count": 1,
    }
    for name, value in told.items():
        setattr(NonNvmlCudaPlatform, name, classmethod(lambda cls, device_id=0, value=value: value))
    vllm.platforms._current_platform = NonNvmlCudaPlatform()
    vllm.config.vllm.HAS_TRITON = True


def main(target: str, drafter: str) -> None:
    pretend_a_gpu((9, 0))
    from vllm.engine.arg_utils import EngineArgs

    from vllm_redrafter import plugin

    plugin.register()
    speculative = {"model": drafter, "num_speculative_tokens": 8}
    config = EngineArgs(
        target, speculative_config=speculative, skip_tokenizer_init=True
    ).create_engine_config()
    compilation = config.compilation_config
    print(
        json.dumps(
            {
                "worker": config.parallel_config.worker_cls,
                "attention": config.attention_config.backend.name,
                "model_runner_v2": config.use_v2_model_runner,
                "asynchronous": config.scheduler_config.async_scheduling,
                "graphs": compilation.cudagraph_mode.name,
                "sizes": compilation.cudagraph_capture_sizes,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
