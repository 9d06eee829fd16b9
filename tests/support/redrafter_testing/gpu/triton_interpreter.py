# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter for this process: TRITON_INTERPRET=1 is set while kernels are imported."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu import interpreter_speed
from vllm_redrafter import triton_kernels

ON_GPU = torch.cuda.is_available()


def import_interpreted(*modules: str) -> None:
    """Import the modules, afresh if they are imported already: their kernels are interpreted."""
    for name in modules:
        sys.modules.pop(name, None)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        # A launch imports this, and it looks at the variable too.
        importlib.import_module("triton.experimental.gluon")
        for name in modules:
            importlib.import_module(name)


def import_kernels(*launching: str, despite_gpu: bool = False) -> None:
    """Unless there is a GPU: all of our kernels so, and these modules of `engine/v2` afresh."""
    if despite_gpu or not ON_GPU:
        kernels = iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}.")
        modules = (f"vllm_redrafter.engine.v2.{name}" for name in launching)
        import_interpreted(*(kernel.name for kernel in kernels), *modules)


class Memory:
    """Which memory kernels touch, and how many elements they `stored`; elsewhere is an error."""

    def __init__(self) -> None:
        self.stored = 0
        self._more: list[Tensor] = []
        self._starts = self._ends = np.empty(0, dtype=np.uint64)

    @contextmanager
    def allow(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Tensors that a launch reaches by addresses in memory, not as arguments."""
        self._more = list(tensors)
        try:
            yield
        finally:
            self._more = []

    def open(self, arguments: Iterable[Any]) -> None:
        tensors = [*(x for x in arguments if isinstance(x, Tensor)), *self._more]
        storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors)}
        starts = sorted(storages)
        self._starts = np.array(starts, dtype=np.uint64)
        self._ends = np.array([start + storages[start] for start in starts], dtype=np.uint64)

    def check(self, pointers: Any, mask: Any) -> int:
        """Every address is inside; returns how many there are."""
        at = pointers.data[mask.data]
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        tensor = np.searchsorted(self._starts, at, side="right") - 1
        inside = (tensor >= 0) & (at + size <= self._ends[tensor])
        assert inside.all(), "the kernel touches memory outside its arguments"
        return at.size


def kernels_run() -> AbstractContextManager[Memory | None]:
    """While this is entered, what `import_kernels` imported runs; on a GPU, there."""
    return nullcontext() if ON_GPU else interpreted()


@contextmanager
def interpreted() -> Iterator[Memory]:
    """While this is entered, what `import_interpreted` imported runs, and runs as on a GPU.

    Else `tl.sum` and the like may be compiled, and bf16 matrices multiplied by their bits.
    """
    import triton.language as tl
    from triton.runtime.interpreter import (
        GridExecutor,
        InterpretedFunction,
        InterpreterBuilder,
        TensorHandle,
        _patch_lang,
    )
    from triton.runtime.jit import JITFunction

    memory = Memory()
    interpret = functools.cache(InterpretedFunction)

    def call(function: JITFunction | InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        return interpret(function.fn).rewrite()(*args, **kwargs)

    def wrap(cls: type, name: str, wrapper: Callable[..., Any]) -> None:
        patch.setattr(cls, name, functools.partialmethod(wrapper, getattr(cls, name)))

    def dot(
        builder: InterpreterBuilder, original: Any, a: TensorHandle, b: TensorHandle, *rest: Any
    ) -> TensorHandle:
        a, b = (
            builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return original(builder, a, b, *rest)

    def load(
        builder: InterpreterBuilder, original: Any, pointers: Any, mask: Any, *rest: Any
    ) -> TensorHandle:
        memory.check(pointers, mask)
        return original(builder, pointers, mask, *rest)

    def store(
        builder: InterpreterBuilder, original: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> None:
        memory.stored += memory.check(pointers, mask)
        original(builder, pointers, value, mask, *rest)

    def begin(executor: GridExecutor, original: Any, args: Any, kwargs: Any) -> Any:
        memory.open([*args, *kwargs.values()])
        return original(executor, args, kwargs)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for owner, name, value in interpreter_speed.replacements():
            patch.setattr(owner, name, value)
        # Done by each call of such a function otherwise, never undone, and half of the time spent.
        stack.callback(_patch_lang(tl.standard.sum.fn).restore)
        patch.setattr(InterpretedFunction, "__call__", call)
        patch.setattr(JITFunction, "__call__", call)
        wrap(InterpreterBuilder, "create_dot", dot)
        wrap(InterpreterBuilder, "create_masked_load", load)
        wrap(InterpreterBuilder, "create_masked_store", store)
        wrap(GridExecutor, "_init_args_hst", begin)
        yield memory
