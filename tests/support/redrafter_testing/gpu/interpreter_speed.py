# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without types, casts and broadcasts that it need not compute again."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any


def replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to set: an object, the name of its attribute and the value; results are as before."""
    import triton.language as tl
    from triton.runtime import interpreter

    constexpr, tensor, dtype = tl.constexpr, tl.tensor, tl.dtype
    block_type, pointer_type = tl.block_type, tl.core.pointer_type

    make_block, blocks = block_type.__init__, {}

    def make_known_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[s.value if type(s) is constexpr else s for s in shape]
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    make_tensor = tensor.__init__

    def make_tensor_of_known_shape(self: Any, handle: Any, type: Any) -> None:
        try:
            self.shape, self.numel, self.dtype = type.of_tensors
        except AttributeError:
            make_tensor(self, handle, type)
            type.of_tensors = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type

    def make_handle(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}

    numpy_type = interpreter._get_np_dtype

    def known_numpy_type(type: Any) -> Any:
        try:
            return type.in_numpy
        except AttributeError:
            type.in_numpy = numpy_type(type)
            return type.in_numpy

    def same_dtype(self: Any, other: Any) -> bool:
        if self is other:
            return True
        other = other.value if type(other) is constexpr else other
        return isinstance(other, dtype) and self.name == other.name

    def itself(self: Any, builder: Any) -> Any:
        return self

    def unwrapped(x: Any) -> Any:
        kind = type(x)
        if kind in plain:
            return x
        return x.value if kind is constexpr else unwrap(x)

    unwrap = tl.core._unwrap_if_constexpr
    plain = {tensor, bool, int, float, str, type(None), dtype, block_type, pointer_type}

    patch_attribute = interpreter._patch_attr
    builtin_call = tl.core.add.__code__

    def patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if member.__code__ is not builtin_call:
            patch_attribute(obj, name, member, builder, scope)
            return
        function = member.__wrapped__

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    semantic = type(interpreter.interpreter_semantic)
    check_types, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def check_other_types(self: Any, a: Any, b: Any, *allowed: bool, **more: bool) -> Any:
        same = type(a) is type(b) is tensor and vars(a.type) is vars(b.type)
        if same and not a.dtype.is_ptr() and not more and len(allowed) < 3:  # no division
            return a, b
        return check_types(self, a, b, *allowed, **more)

    def broadcast_others(self: Any, a: Any, b: Any) -> Any:
        is_block = type(a.type) is block_type
        same = not is_block or a.handle.data.shape == b.handle.data.shape
        if same and is_block == (type(b.type) is block_type):
            return a, b
        return broadcast(self, a, b)

    options = interpreter.InterpreterOptions(sanitize_overflow=False)  # nothing is reported
    yield interpreter.interpreter_builder, "options", options
    yield block_type, "__init__", make_known_block
    yield block_type, "to_ir", itself
    yield pointer_type, "to_ir", itself
    yield tl.core, "_unwrap_if_constexpr", unwrapped
    yield tl.core, "_normalize_cache_policy", cache(tl.core._normalize_cache_policy)
    yield dtype, "__eq__", same_dtype
    yield tensor, "__init__", make_tensor_of_known_shape
    yield interpreter.TensorHandle, "__init__", make_handle
    yield interpreter, "_get_np_dtype", known_numpy_type
    yield interpreter, "_patch_attr", patch_builtin
    yield semantic, "binary_op_type_checking_impl", check_other_types
    yield semantic, "broadcast_impl_value", broadcast_others
