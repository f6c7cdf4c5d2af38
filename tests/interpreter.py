"""Triton's interpreter as tests use it: quicker, and rounding as a GPU does. Importing this module changes it."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter

# The interpreter replaces the functions of the language again in every call of a kernel's helper, which is most of
# its time. Once for each helper is enough.
_original_call = interpreter.InterpretedFunction.__call__
_prepared: set[Any] = set()


def _call(self: Any, *arguments: Any, **options: Any) -> Any:
    if self.fn not in _prepared:
        _prepared.add(self.fn)
        return _original_call(self, *arguments, **options)
    return self.rewrite()(*arguments, **options)


interpreter.InterpretedFunction.__call__ = _call

# It also looks up the dtype of numpy, and makes constants of a tensor's shape, anew in every operation.
_original_dtype = interpreter._get_np_dtype
_dtypes: dict[str, Any] = {}


def _dtype_of(known_type: Any) -> Any:
    # Types of blocks and pointers have no hash.
    name = known_type.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _original_dtype(known_type)
    return _dtypes[name]


interpreter._get_np_dtype = _dtype_of


@functools.cache
def _shape_and_size(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _initialise(self: Any, handle: Any, its_type: Any) -> None:
    tl.core.base_value.__init__(self)
    self.handle, self.type, self.dtype = handle, its_type, its_type.scalar
    self.shape, self.numel = _shape_and_size(its_type.shape if its_type.is_block() else ())


tl.tensor.__init__ = _initialise

# The interpreter cuts a float32 off where a GPU rounds it to bfloat16.
_original_convert = interpreter._convert_float


def _convert(values: Any, given: Any, wanted: Any, rounding_mode: Any) -> Any:
    if rounding_mode is None and (given.name, wanted.name) == ("fp32", "bf16"):
        rounded = torch.from_numpy(values.reshape(-1).copy()).bfloat16()
        return rounded.view(torch.int16).numpy().view("uint16").reshape(values.shape)
    return _original_convert(values, given, wanted, rounding_mode)


interpreter._convert_float = _convert
