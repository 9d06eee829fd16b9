"""How the processes of a training hold the drafter: each all of it, or each a share.

`Replicas` is data parallelism as accelerate does it (DDP): each process holds all parameters,
gradients and moments of AdamW, 16 bytes a parameter. With `Shards` (torch's FSDP2) each holds its
share of the rows of every matrix; whole are, while a step runs, weights and gradient alone. The
shares are gathered before the forward pass and not between it and the backward pass, so that the
loss reads `last_layer.weight` as ever. Checkpoints are the same for both.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.training.distillation import Distillation

State = dict[str, Any]
"""Of an optimizer, as `state_dict` has it."""


class Parallel(Protocol):
    """What the trainer needs of either."""

    model: Any
    """Called for the loss of a batch."""

    def summed(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward pass; only the last of a step sums over the processes."""
        ...

    def whole_drafter(self) -> DraftHead:
        """The drafter with all of its weights; all processes call it."""
        ...

    def whole_state(self, optimizer: torch.optim.Optimizer) -> State:
        """The optimizer's state, of all of the drafter; all processes call it."""
        ...

    def load(
        self, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: State
    ) -> None:
        """Take up whole weights and an optimizer's whole state."""
        ...

    def close(self) -> None:
        """Let go of the processes' group, before it ends; nothing is trained afterwards."""
        ...


class Replicas:
    """Each process holds all of the drafter.

    Args:
        model: the drafter with its loss, on the process's device.
        accelerator: the processes.
    """

    def __init__(self, model: Distillation, accelerator: Accelerator) -> None:
        self._drafter, self._accelerator = model.drafter, accelerator
        self.model = accelerator.prepare(model)

    def summed(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._accelerator.no_sync(self.model)

    def whole_drafter(self) -> DraftHead:
        return self._drafter

    def whole_state(self, optimizer: torch.optim.Optimizer) -> State:
        return optimizer.state_dict()

    def load(
        self, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: State
    ) -> None:
        self._drafter.load_state_dict(weights)
        optimizer.load_state_dict(state)

    def close(self) -> None:
        # The frames of an exception may refer to DDP's module for longer. Its reducer would then
        # free a gloo group and hold the GIL meanwhile, for which the group's thread may wait.
        for module in self.model.modules():
            if isinstance(module, DistributedDataParallel):
                for name in ("logger", "reducer", "process_group"):
                    vars(module).pop(name, None)


class Shards:
    """Each process holds a share of the drafter; its optimizer is made afterwards.

    Args:
        model: the drafter with its loss, on the process's device.
        accelerator: the processes, more than one.
    """

    def __init__(self, model: Distillation, accelerator: Accelerator) -> None:
        self._drafter, self._main = model.drafter, accelerator.is_main_process
        self._without_values = _without_values(model.drafter)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        self.model: Any = fully_shard(model, mesh=mesh, reshard_after_forward=False)
        assert isinstance(self.model, FSDPModule)

    def summed(self, last: bool) -> AbstractContextManager[Any]:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def whole_drafter(self) -> DraftHead:
        weights = {name: _whole(value) for name, value in self._drafter.state_dict().items()}
        drafter = copy.deepcopy(self._without_values)
        drafter.load_state_dict(weights, assign=True)
        return drafter.train(self._drafter.training)

    def whole_state(self, optimizer: torch.optim.Optimizer) -> State:
        found = optimizer.state_dict()
        return {
            **found,
            "state": {
                parameter: {name: self._kept(value) for name, value in moments.items()}
                for parameter, moments in found["state"].items()
            },
        }

    def load(
        self, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: State
    ) -> None:
        own = self._drafter.state_dict()
        self._drafter.load_state_dict({name: _share(weights[name], own[name]) for name in weights})
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        shares = {
            number: {name: _share(value, parameters[number]) for name, value in moments.items()}
            for number, moments in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": shares})

    def close(self) -> None:
        """Nothing: FSDP's references to the group are Python's, which free it without the GIL."""

    def _kept(self, value: Any) -> Any:
        """A moment, whole, in the memory of the process that writes it."""
        if not isinstance(value, DTensor):
            return value
        whole = _whole(value)
        return whole.cpu() if self._main else None


def _without_values(drafter: DraftHead) -> DraftHead:
    """A drafter of the same kind and sizes, its parameters on the device `meta`."""
    empty = {id(p): nn.Parameter(p.detach().to("meta"), False) for p in drafter.parameters()}
    return copy.deepcopy(drafter, empty)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _share(value: Any, like: Any) -> Any:
    """What this process holds of a whole tensor, if it is shared out as the other one is."""
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    value = value.to(like.device)
    # Every process has read the values.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
