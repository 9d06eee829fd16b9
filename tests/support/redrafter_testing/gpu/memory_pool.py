# SPDX-License-Identifier: Apache-2.0
"""vLLM's memory pool on a CPU: sleep level 2 gives its memory back, so that it holds anything."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class MemoryPool(TorchDispatchMode):
    """While entered, remembers what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self._allocated: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        self.add(tensor for tensor in tensors_in(result) if memory_of(tensor) not in given)
        return result

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What was allocated."""
        return list(self._allocated.values())

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that are in the pool besides."""
        self._allocated.update((memory_of(tensor), tensor.detach()) for tensor in tensors)

    def discard(self) -> None:
        """Fill what was allocated with NaN, or with integers of no meaning."""
        with _disable_current_modes(), torch.inference_mode():
            for tensor in self._allocated.values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Those of them that have memory."""
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.numel() and leaf.device.type != "meta"]


def memory_of(tensor: torch.Tensor) -> int:
    """The address of its storage."""
    return tensor.untyped_storage().data_ptr()


def use() -> None:
    """Engines started in this process load into such a pool and sleep as vLLM's GPU worker does."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    load_model = CPUWorker.load_model
    pool, buffers = MemoryPool(), {}

    def load(worker: Any, *args: Any, **kwargs: Any) -> None:
        with pool:
            load_model(worker, *args, **kwargs)
        # Read from files, and left where they are: a GPU has copies of them.
        pool.add(worker.model_runner.trunk.drafter.state_dict().values())

    def sleep(worker: Any, level: int = 1) -> None:
        if level == 2:  # vLLM saves the target's buffers, and no others
            target = worker.model_runner.model
            buffers.update({name: buffer.clone() for name, buffer in target.named_buffers()})
            pool.discard()

    def wake_up(worker: Any, tags: list[str] | None = None) -> None:
        if buffers and (tags is None or "weights" in tags):
            for name, buffer in worker.model_runner.model.named_buffers():
                buffer.copy_(buffers[name])
            buffers.clear()

    CPUWorker.load_model, CPUWorker.sleep, CPUWorker.wake_up = load, sleep, wake_up
