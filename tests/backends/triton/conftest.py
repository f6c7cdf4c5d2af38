"""Tests of kernels on machines without a GPU.

Triton has an interpreter that runs kernels on CPU tensors. It is chosen when kernels are defined, for a whole process,
by TRITON_INTERPRET=1, while the tests around these want kernels that compile. So there are two kinds of files here:

* ``test_logits_kernels``, ``test_per_class_gradients``, ``test_losses``, ``test_fused_loss``, ``test_smoothed_row``,
  ``test_pipelined_row``, ``test_sharded``, ``test_statistics``, ``test_mixture_log_probs``, ``test_extremes``,
  ``test_tokens`` and ``test_intrinsics`` run kernels. On a machine with a GPU they run on it. Elsewhere they skip
  themselves, and ``test_interpreted`` runs them in processes that have the variable set;
* ``test_compile`` and ``test_sources`` need no GPU, ``test_gpu`` needs one.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sigsoftmax.contract import signature
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LossPath, LossResults
from sigsoftmax.losses import lowering

if os.environ.get("TRITON_INTERPRET") == "1":
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


@pytest.fixture
def _fresh_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is read before it is written shows."""

    def poisoning(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fresh(*arguments: Any, **options: Any) -> Tensor:
            result = original(*arguments, **options)
            with torch.no_grad():
                return result.fill_(math.nan) if result.is_floating_point() else result

        return fresh

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


@pytest.fixture
def fused_paths(monkeypatch: pytest.MonkeyPatch) -> list[LossPath]:
    """The fused paths by which losses were computed; no call was lowered before."""
    from sigsoftmax.backends.triton.fused_loss import FusedLoss
    from sigsoftmax.backends.triton.fused_mixture import FusedMixture

    used: list[LossPath] = []

    def recording(original: Callable[..., LossResults]) -> Callable[..., LossResults]:
        def compute(path: LossPath, operands: Operands, by_losses: Tensor | None = None) -> LossResults:
            used.append(path)
            return original(path, operands, by_losses)

        return compute

    for kind in (FusedLoss, FusedMixture):
        monkeypatch.setattr(kind, "compute", recording(kind.compute))
    monkeypatch.setattr(lowering, "_lowered", {})
    monkeypatch.setattr(signature, "checks_values", lambda device: False)
    return used
