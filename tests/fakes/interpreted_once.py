"""Cheaper kernels under Triton's interpreter, for a process that does nothing but interpret.

Imported for what it does to the interpreter. At each call of a device function that patches triton.language anew; it
makes out of every sum and product of integers whether it overflows, only to drop what came of it, as nobody can switch
its debugging on; and at each operation it describes the same few types and shapes again. Together that is three
quarters of what an interpreted kernel costs. What is computed stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

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
        block_types[key] = {**vars(self), "of_tensors": shape_and_size(self.shape)}
    self.__dict__.update(block_types[key], element_ty=element_ty)


SCALAR = shape_and_size(())


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else SCALAR


def broadcast_where_shapes_differ(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    if lhs.type.is_block() and rhs.type.is_block() and list(lhs.type.shape) == list(rhs.type.shape):
        return lhs, rhs
    return broadcast(self, lhs, rhs)


interpreter._get_np_dtype = np_dtype_of
tl.core.block_type.__init__ = init_block_type
tl.core.tensor.__init__ = init_tensor
interpreter.TritonSemantic.broadcast_impl_value = broadcast_where_shapes_differ
