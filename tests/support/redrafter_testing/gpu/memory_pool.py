# SPDX-License-Identifier: Apache-2.0
"""vLLM's memory pool on a CPU: sleep level 2 gives its memory back, so that it holds anything."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
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


def use(set_up: Callable[[], None] | None = None) -> None:
    """Engines started in this process load into such a pool and sleep as vLLM's GPU worker does.

    `set_up` prepares the process for something else as well.
    """
    if set_up is not None:
        set_up()
    from vllm.v1.worker.cpu_worker import CPUWorker

    load_model = CPUWorker.load_model
    pool, saved = MemoryPool(), list[torch.Tensor]()

    def load(worker: Any, *args: Any, **kwargs: Any) -> None:
        with pool:
            load_model(worker, *args, **kwargs)
        trunk = worker.model_runner.trunk
        if trunk.chain is None:
            # Read from files, and left where they are: a GPU has copies of them.
            pool.add(trunk.drafter.state_dict().values())

    def buffers_of(worker: Any) -> Iterator[torch.Tensor]:
        models = worker.model_runner.model, worker.get_draft_model()
        return chain.from_iterable(model.buffers() for model in models if model is not None)

    def sleep(worker: Any, level: int = 1) -> None:
        if level == 2:  # vLLM saves buffers of the target and of a drafter of its own
            saved.extend(buffer.clone() for buffer in buffers_of(worker))
            pool.discard()

    def wake_up(worker: Any, tags: list[str] | None = None) -> None:
        if saved and (tags is None or "weights" in tags):
            for buffer, kept in zip(buffers_of(worker), saved, strict=True):
                buffer.copy_(kept)
            saved.clear()

    CPUWorker.load_model, CPUWorker.sleep, CPUWorker.wake_up = load, sleep, wake_up
