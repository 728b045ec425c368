"""Cheaper kernels under Triton's interpreter, for a process that does nothing but interpret.

Imported for what it does to the interpreter. At each call of a device function that patches triton.language anew; it
makes out of every sum and product of integers whether it overflows, only to drop what came of it, as nobody can switch
its debugging on; and at each operation it describes the same few types and shapes again, and asks what operands of one
type have in common, or spreads the same number over the same shape. Together that is most of what an interpreted kernel
costs. What is computed stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_builtin_member(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, call)


interpreter._patch_attr = patch_builtin_member
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
KEPT = SimpleNamespace(restore=lambda: None)
interpreter._patch_lang = lambda fn: KEPT

OPTIONS = interpreter.InterpreterOptions(sanitize_overflow=False)
assert not OPTIONS.debug, "an interpreter that debugs would say what overflows"
interpreter.interpreter_builder.options = OPTIONS

describe_dtype, describe_block = interpreter._get_np_dtype, tl.core.block_type.__init__
broadcast = interpreter.TritonSemantic.broadcast_impl_value
np_dtypes: dict[str, np.dtype] = {}
block_types: dict[tuple[Any, ...], dict[str, Any]] = {}


def np_dtype_of(dtype: Any) -> np.dtype:
    name = dtype.name
    if name not in np_dtypes:
        np_dtypes[name] = describe_dtype(dtype)
    return np_dtypes[name]


def shape_and_size(shape: Sequence[int]) -> tuple[Any, Any]:
    """A tensor's, from its type's."""
    return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def init_block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    key = (element_ty.name, *[size if type(size) is int else size.value for size in shape])
    if key not in block_types:
        describe_block(self, element_ty, shape)
        block_types[key] = {**vars(self), "of_tensors": shape_and_size(self.shape), "sizes": key[1:]}
    self.__dict__.update(block_types[key], element_ty=element_ty)


SCALAR = shape_and_size(())


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else SCALAR


def broadcast_where_shapes_differ(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.sizes == rhs.type.sizes:
        return lhs, rhs
    return broadcast(self, lhs, rhs)


def unwrap(value: Any) -> Any:
    if type(value) is tl.constexpr:
        return value.value
    return value if type(value) is tl.tensor or type(value) is int else unwrap_any(value)


# Of these, two of one type are computed in it, whatever the operation.
PLAIN = {"fp32", "fp64", "int1", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}


def check_operands(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
    """Both operands in the type and the shape in which they are computed."""
    if isinstance(lhs, tl.tensor):
        if isinstance(rhs, tl.tensor):
            if lhs.dtype.name in PLAIN and are_alike(lhs.type, rhs.type):
                return lhs, rhs
        elif type(rhs) in (int, float):
            return lhs_and_number(self, lhs, rhs, options, named)
    return find_operands(self, lhs, rhs, *options, **named)


def are_alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return one.is_block() and other.is_block() and one.of_tensors is other.of_tensors


def lhs_and_number(self: Any, lhs: Any, number: float, options: Any, named: dict[str, Any]) -> tuple[Any, Any]:
    kind = id(lhs.type.of_tensors) if lhs.type.is_block() else lhs.type.name
    key = (kind, type(number), number, math.copysign(1, number), options, *named.items())
    if key not in numbers:
        converted, tensor = find_operands(self, lhs, number, *options, **named)
        if converted is not lhs:
            return converted, tensor
        tensor.handle.data.flags.writeable = False  # it is everybody's
        numbers[key] = tensor
    return lhs, numbers[key]


unwrap_any = tl.core._unwrap_if_constexpr
tl.core._unwrap_if_constexpr = unwrap
find_operands = interpreter.TritonSemantic.binary_op_type_checking_impl
numbers: dict[tuple[Any, ...], Any] = {}
interpreter.TritonSemantic.binary_op_type_checking_impl = check_operands
interpreter._get_np_dtype = np_dtype_of
tl.core.block_type.__init__ = init_block_type
tl.core.tensor.__init__ = init_tensor
interpreter.TritonSemantic.broadcast_impl_value = broadcast_where_shapes_differ
