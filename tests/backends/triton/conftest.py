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
    import tests.interpreter  # noqa: F401


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
