"""How kernels are tested where there is no GPU.

Triton has an interpreter that runs kernels on CPU tensors. It is chosen when kernels are defined, for a whole process,
by TRITON_INTERPRET=1, while the tests around these want kernels that compile. So there are two kinds of files here:

* ``test_rows``, ``test_columns``, ``test_losses``, ``test_plans``, ``test_smoothing``, ``test_stream``,
  ``test_sharded``, ``test_tokens`` and ``test_intrinsics`` run kernels. On a machine with a GPU they run on it.
  Elsewhere they skip themselves, and ``test_interpreted`` runs each of them in a process of its own that has the
  variable set;
* ``test_compile`` and ``test_sources`` need no GPU, ``test_gpu`` needs one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from sigsoftmax import known_calls, validation

if TYPE_CHECKING:
    from sigsoftmax.backends.triton.plans import Plan

if os.environ.get("TRITON_INTERPRET") == "1":
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


@pytest.fixture
def _fresh_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read before it is written shows."""

    def poisoning(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fresh(*arguments: Any, **options: Any) -> Tensor:
            result = original(*arguments, **options)
            with torch.no_grad():
                return result.fill_(math.nan) if result.is_floating_point() else result

        return fresh

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans by which losses were computed; none is known before."""
    from sigsoftmax.backends.triton import plans

    used: list[Plan] = []
    original = plans.loss_by

    def loss_by(plan: Plan, *tensors: Tensor | None) -> Tensor:
        used.append(plan)
        return original(plan, *tensors)

    monkeypatch.setattr(plans, "loss_by", loss_by)
    monkeypatch.setattr(known_calls, "_known", {})
    monkeypatch.setattr(validation, "wants_messages", lambda device: False)
    return used
