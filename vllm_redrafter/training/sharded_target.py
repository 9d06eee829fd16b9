"""The target's layers shared out over the processes of a training: for one that fits no device.

Each process holds a share of every layer's parameters, and all gather a layer when they run it
(torch's FSDP2, forward pass only: the target is frozen). Each process reads blocks of its own, as
it does with the whole target; only, all must run it equally often. The ends stay whole: training
reads the embedding by itself, and the output layer in as many chunks as a process's own rows make.

Tensor parallelism is not offered: there all processes read the same block, and a training on
eight devices would be no faster than one on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from vllm_redrafter.data.target_files import load_from
from vllm_redrafter.training.target import load_target, model_factory
from vllm_redrafter.utils.errors import ConfigError


def load_sharded_target(
    name: str | Path, dtype: torch.dtype | str = torch.float32, device: torch.device | str = "cpu"
) -> Any:
    """Load a causal language model of which this process keeps a share, frozen and in eval mode.

    The first process reads it into its memory, not the device's, and sends the others each layer.
    All processes, of which there are several, call it.

    Args:
        name, dtype: see `load_target`.
        device: where this process's share goes.

    Raises:
        ConfigError: see `load_target`; or the model is quantised, or transformers does not say
            what the model's layers are.
    """
    config = load_from(AutoConfig, str(name))
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"target {str(name)!r} is quantised, and target_parallel fsdp shares plain weights "
            "out: give the model that it was made of, with --other-target"
        )
    first = distributed.get_rank() == 0
    target = load_target(name, dtype) if first else _without_values(config)
    _agree_on_dtypes(target)
    layers = _layers(target, name)
    mesh = init_device_mesh(torch.device(device).type, (distributed.get_world_size(),))
    for layer in layers:
        _put(layer.modules(), device, first)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    sharded = {module for layer in layers for module in layer.modules()}
    _put((module for module in target.modules() if module not in sharded), device, first)
    target.tie_weights()
    whole = {p for p in target.parameters() if not isinstance(p, DTensor)}
    # It owns no parameter, but lets a layer be gathered while the one before it runs.
    model, kind = target.base_model, type(target.base_model)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    # By its class transformers knows how a model hands out hidden states; FSDP's hooks stay.
    model.__class__ = kind
    return target.eval().requires_grad_(False)


def bytes_here(target: Any) -> tuple[int, int]:
    """Bytes of a sharded target's layers: this process's share, and all."""
    shared = [p for p in target.parameters() if isinstance(p, DTensor)]
    return sum(p.to_local().nbytes for p in shared), sum(p.nbytes for p in shared)


def _without_values(config: Any) -> Any:
    """The same model, on the device `meta`."""
    with torch.device("meta"):
        return model_factory(config).from_config(config)


def _agree_on_dtypes(target: Any) -> None:
    """Give all tensors the dtypes that the first process has read from the checkpoint."""
    tensors = dict(_named_tensors(target))
    told = [{key: tensor.dtype for key, tensor in tensors.items()}]
    distributed.broadcast_object_list(told)
    for key, dtype in told[0].items():
        tensors[key].data = tensors[key].data.to(dtype)


def _layers(target: Any, name: str | Path) -> list[nn.Module]:
    """The modules that transformers would never divide, which are a model's layers."""
    classes = set(target.base_model._no_split_modules or ())
    layers = [module for module in target.modules() if type(module).__name__ in classes]
    inside = {module for layer in layers for module in layer.modules()}
    if not layers or target.get_input_embeddings() in inside:
        raise ConfigError(
            f"target {str(name)!r}: transformers does not say which of its modules are layers, and "
            "target_parallel fsdp shares layers out: capture its hidden states instead, and give "
            "--hidden-states"
        )
    return layers


def _put(modules: Iterable[nn.Module], device: torch.device | str, first: bool) -> None:
    """Move the modules' own tensors to the device, with the first process's values in all."""
    for module in modules:
        if not first:
            module.to_empty(device=device, recurse=False)
        for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            tensor.data = tensor.data.to(device)
            distributed.broadcast(tensor.data, 0)


def _named_tensors(target: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from target.named_parameters()
    yield from target.named_buffers()
