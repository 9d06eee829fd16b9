# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without the types of results that it computes again for every operation."""

import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any


def replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to set: an object, the name of its attribute and the value; results are as before."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
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

    def same_block(self: Any, other: Any) -> bool:
        return isinstance(other, block_type) and self.name == other.name

    def itself(self: Any, builder: Any) -> Any:
        return self

    computation_type, computed = TritonSemantic.computation_type_impl, {}

    def known_computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, *rest: bool) -> Any:
        key = a.name, a_is_scalar, b.name, *rest
        if key not in computed:
            computed[key] = computation_type(self, a, a_is_scalar, b, *rest)
        return computed[key]

    check_operands = TritonSemantic.binary_op_type_checking_impl
    checked: dict[Any, Any] = {}

    def operands(self: Any, lhs: Any, rhs: Any, *rest: bool, **flags: bool) -> tuple[Any, Any]:
        """Tensors that need no conversion, as they are; numbers as the tensors they were before."""
        is_tensor = type(lhs) is tensor, type(rhs) is tensor
        names = [x.type.name if isinstance(x, tensor) else (type(x), repr(x)) for x in (lhs, rhs)]
        key = *names, rest, *flags.items()
        if key in checked:
            known = checked[key]
            return lhs if known[0] is None else known[0], rhs if known[1] is None else known[1]
        found = check_operands(self, lhs, rhs, *rest, **flags)
        changed = [new is not old for new, old in zip(found, (lhs, rhs), strict=True)]
        if any(is_tensor) and not any(map(operator.and_, is_tensor, changed)):
            checked[key] = [None if t else x for t, x in zip(is_tensor, found, strict=True)]
        return found

    def unwrapped(x: Any) -> Any:
        kind = type(x)
        if kind in plain:
            return x
        return x.value if kind is constexpr else unwrap(x)

    unwrap = tl.core._unwrap_if_constexpr
    plain = {tensor, bool, int, float, str, type(None), dtype, block_type, pointer_type}

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_ranks(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        a, b = lhs.type, rhs.type
        if not a.is_block() or not b.is_block() or len(a.shape.values) != len(b.shape.values):
            return broadcast(self, lhs, rhs)
        sizes = list(map(max, a.shape.values, b.shape.values))
        return tuple(
            x if x.type.shape.values == sizes else self.broadcast_impl_shape(x, sizes)
            for x in (lhs, rhs)
        )

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

    yield block_type, "__init__", make_known_block
    yield block_type, "__eq__", same_block
    yield block_type, "to_ir", itself
    yield pointer_type, "to_ir", itself
    yield tl.core, "_unwrap_if_constexpr", unwrapped
    yield tl.core, "_normalize_cache_policy", cache(tl.core._normalize_cache_policy)
    yield dtype, "__eq__", same_dtype
    yield tensor, "__init__", make_tensor_of_known_shape
    yield interpreter.TensorHandle, "__init__", make_handle
    yield interpreter, "_get_np_dtype", known_numpy_type
    yield interpreter, "_patch_attr", patch_builtin
    yield TritonSemantic, "computation_type_impl", known_computation_type
    yield TritonSemantic, "binary_op_type_checking_impl", operands
    yield TritonSemantic, "broadcast_impl_value", broadcast_ranks
