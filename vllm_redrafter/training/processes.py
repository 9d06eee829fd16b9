# SPDX-License-Identifier: Apache-2.0
"""The processes of a training and their devices, by accelerate."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, parse_flag_from_env

from vllm_redrafter.training.training_config import Precision
from vllm_redrafter.utils.errors import ConfigError

PLUGINS = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
"""By the end of the variable that `accelerate launch` sets, ACCELERATE_USE_..."""


@contextmanager
def ended(accelerator: Accelerator) -> Iterator[Accelerator]:
    """End the processes' group after the body, which has to call `Trainer.close`."""
    try:
        yield accelerator
    except BaseException:
        # NCCL's group ends when all processes end it, and others may wait for this one elsewhere:
        # there it ends with the process.
        if accelerator.device.type == "cpu":
            accelerator.end_training()
        raise
    accelerator.end_training()


def make_accelerator(
    precision: Precision = "auto", unroll_steps: int = 2, output: Path | None = None
) -> Accelerator:
    """The processes and their devices, as `accelerate launch` started them.

    TensorBoard's logs go to `output`; ConfigError where the drafter was to be sharded.
    """
    for name, plugin in PLUGINS.items():
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise ConfigError(
                f"training: accelerate's {plugin} would replace drafter and optimizer by its own, "
                "whose checkpoints nobody else reads: start without it; a target that fits no "
                "device is for `vllm-redrafter capture` and --hidden-states"
            )
    if precision == "auto":
        on_gpu = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
        has_bf16 = on_gpu and torch.cuda.is_bf16_supported(False)
        precision = "bf16" if has_bf16 else "no"
    # With one step rnn_u takes no part, which data parallelism has to know.
    kwargs = DistributedDataParallelKwargs(find_unused_parameters=unroll_steps == 1)
    return Accelerator(
        mixed_precision=precision,
        log_with=None if output is None else "tensorboard",
        project_dir=None if output is None else str(output),
        kwargs_handlers=[kwargs],
    )
