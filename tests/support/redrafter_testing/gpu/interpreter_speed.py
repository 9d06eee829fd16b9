# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without the types of results that it computes again for every operation."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

COMPARISONS = "lt", "le", "gt", "ge", "eq", "ne"
OTHERS = "add", "sub", "mul", "truediv", "mod", "and", "or", "xor", "lshift", "rshift"
OPERATORS = [f"__{name}__" for name in (*COMPARISONS, *OTHERS)]
REFLECTED = {"__radd__": "__add__", "__rmul__": "__mul__"}
ARITHMETIC = np.add, np.subtract, np.multiply  # of truth values, not NumPy's


def replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to set: an object, the name of its attribute and the value; results are as before."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder_type = interpreter.InterpreterBuilder
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

    calculate, move = builder_type.binary_op, builder_type.create_addptr
    calculated: deque[tuple[Any, ...]] = deque(maxlen=2)

    def binary_op(self: Any, lhs: Any, rhs: Any, function: Any) -> Any:
        result = calculate(self, lhs, rhs, function)
        calculated.append((function, lhs, rhs, result))
        return result

    def create_addptr(self: Any, pointers: Any, offsets: Any) -> Any:
        result = move(self, pointers, offsets)
        width = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        calculated.append((lambda x, y: x + width * y.astype(np.uint64), pointers, offsets, result))
        return result

    def planned(operator: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """Of operands of types seen before, computes what NumPy was seen to compute."""
        plans: dict[Any, Any] = {}

        def call(lhs: Any, rhs: Any) -> Any:
            rhs = rhs.value if type(rhs) is constexpr else rhs
            is_tensor = type(rhs) is tensor
            key = lhs.type.name, rhs.type.name if is_tensor else (type(rhs), repr(rhs))
            if plan := plans.get(key):
                function, to_left, constant, to_right, handle_type, result_type = plan
                left, right = lhs.handle.data, rhs.handle.data if constant is None else constant
                left = left if to_left is None else left.astype(to_left)
                right = right if to_right is None else right.astype(to_right)
                handle = interpreter.TensorHandle(function(left, right), handle_type)
                return tensor(handle, result_type)
            calculated.clear()
            result = operator(lhs, rhs, _semantic=interpreter.interpreter_semantic)
            if key not in plans:
                plans[key] = plan_of(lhs, rhs, result)
            return result

        return call

    def plan_of(lhs: Any, rhs: Any, result: Any) -> tuple[Any, ...] | None:
        """If it was one operation, whose operands need no more than NumPy's conversions."""
        if len(calculated) != 1 or calculated[0][-1] is not result.handle:
            return None
        function, left, right, out = calculated[0]
        if function in ARITHMETIC and left.data.dtype == right.data.dtype == bool:
            return None
        constant = None if type(rhs) is tensor else right.data.flat[:1]
        given = lhs.handle.data, rhs.handle.data if constant is None else constant
        wanted = left.data.dtype, right.data.dtype
        to = [None if x.dtype == y else y for x, y in zip(given, wanted, strict=True)]
        for operand, conversion in zip((lhs, rhs), to, strict=True):
            if conversion is not None and operand.dtype.name.startswith(("bf", "fp8")):
                return None
        found = function(*map(np.ndarray.astype, given, wanted))
        seen, computed = ((x.dtype, x.shape, x.tobytes()) for x in (out.data, found))
        if seen != computed:
            return None
        return function, to[0], constant, to[1], out.dtype, result.type

    operators = {name: vars(tensor)[name].__wrapped__ for name in OPERATORS}
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

        operator = operators.get(REFLECTED.get(name, name)) if obj is tensor else None
        scope.set_attr(obj, name, call if operator is None else planned(operator))

    options = interpreter.InterpreterOptions(sanitize_overflow=False)  # nothing is reported
    yield interpreter.interpreter_builder, "options", options
    yield builder_type, "binary_op", binary_op
    yield builder_type, "create_addptr", create_addptr
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
