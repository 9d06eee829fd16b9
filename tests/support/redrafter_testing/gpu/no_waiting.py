# SPDX-License-Identifier: Apache-2.0
"""Notices, on a CPU, what would wait for a GPU: values on the host, shapes by values."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

HOST_METHODS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""`numpy` is not among them: it refuses a GPU's tensors by itself."""

WAITING = (
    *("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero"),
    *("aten._unique", "aten.unique", "aten.equal", "aten.bincount"),
    "aten.repeat_interleave.Tensor",
)

INDEXING = ("aten.index.", "aten.index_put", "aten._index_put_impl")
"""They wait if the index is a mask."""


def why_it_waits(operation: str, args: tuple[Any, ...]) -> str | None:
    """The operation, if a GPU would make the host wait for it."""
    if operation.startswith(WAITING):
        return operation
    if operation.startswith(INDEXING) and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        return f"{operation} with a mask"
    return None


@contextmanager
def host_methods(method_of: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    """In the body, tensors have these methods in place of HOST_METHODS."""
    before = {name: getattr(torch.Tensor, name) for name in HOST_METHODS}
    for name in before:
        setattr(torch.Tensor, name, method_of(name))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


class NoWaiting(TorchDispatchMode):
    """While entered, `found` collects what would wait, each as a name and where it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def add(self, what: str) -> None:
        where = [f for f in traceback.extract_stack() if "vllm_redrafter" in f.filename]
        self.found.append(f"{what} at {where[-1].filename}:{where[-1].lineno}" if where else what)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        why = why_it_waits(str(func), args)
        if why:
            self.add(why)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The body is watched."""
        with host_methods(self._noticed), self:
            yield

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside `watching`: the body is not."""
        with host_methods(ORIGINALS.__getitem__), _disable_current_modes():
            yield

    def _noticed(self, name: str) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.add(f"Tensor.{name}")
            return ORIGINALS[name](tensor, *args, **kwargs)

        return call


ORIGINALS = {name: getattr(torch.Tensor, name) for name in HOST_METHODS}


def watch(worker: Any) -> None:
    """Watch our parts of the step from here on; the interpreter, the device, may read tensors."""
    from triton.runtime.interpreter import GridExecutor

    from vllm_redrafter.engine.v2 import context_matching, verification

    worker.no_waiting = watcher = NoWaiting()
    worker.watched_calls = 0

    def watched(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            worker.watched_calls += 1
            with watcher.watching():
                return original(*args, **kwargs)

        setattr(owner, name, call)

    def allowed(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with watcher.allowed():
                return original(*args, **kwargs)

        setattr(owner, name, call)

    allowed(GridExecutor, "__call__")
    allowed(context_matching, "find_earlier")  # what stands in for it
    runner = worker.model_runner
    watched(runner.speculator, "propose")
    watched(runner, "sample")  # the scorer and compaction are called by it
    watched(verification, "stage_trees")


def findings(worker: Any) -> tuple[int, list[str]]:
    """How many calls were watched, and what was found in them."""
    return worker.watched_calls, worker.no_waiting.found
