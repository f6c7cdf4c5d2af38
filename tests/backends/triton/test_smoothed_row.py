"""Label smoothing of fused losses, against the reference in float64.

Shapes: N tokens, V classes, d width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.backends.triton.device import DEVICE
from tests.backends.triton.test_fused_loss import D, N, V, every_dtype, target
from tests.backends.triton.test_losses import check, cross_entropy, linear
from tests.tables import gradients
from torch import Tensor

import sigsoftmax
from sigsoftmax import OutputFunction
from sigsoftmax.backends.chunked import chunk_plan
from sigsoftmax.contract.problem import LossPath

SMOOTH: dict[str, dict[str, Any]] = {
    "smoothing": {"label_smoothing": 0.1},
    "all smoothing": {"label_smoothing": 1.0, "reduction": "sum", "z_loss": 0.05},
}
pytestmark = pytest.mark.usefixtures("_fresh_memory_is_nan", "fused_paths")


@every_dtype
@pytest.mark.parametrize("options", SMOOTH.values(), ids=SMOOTH)
@pytest.mark.parametrize("member", ["softmax(alpha=1.5)", "sigsoftmax", "shifted_sigsoftmax(b=1.3)"])
def test_logits(member: str, options: dict[str, Any], dtype: torch.dtype, fused_paths: list[LossPath]) -> None:
    def loss(logits: Tensor, function: OutputFunction, **options: Any) -> Any:
        return cross_entropy(logits, function=member, **options)

    check(loss, [3.0 * torch.randn(N, V)], dtype, target=target(), **options)
    assert len(fused_paths) == 1


@every_dtype
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("classes", [V, V + 1])
def test_products_with_smoothing(
    classes: int, alignment: int, dtype: torch.dtype, fused_paths: list[LossPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked logits that fill up a row are no classes."""
    monkeypatch.setattr(chunk_plan, "row_alignment", lambda device: alignment)
    inputs = [3.0 * torch.randn(N, D), torch.randn(classes, D), torch.randn(classes)]
    check(linear, inputs, dtype, target=target(), label_smoothing=0.2, z_loss=0.01)
    assert len(fused_paths) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [512, 1000, 5000])
@pytest.mark.parametrize("member", ["softmax(alpha=0.7)", "sigsoftmax", "shifted_sigsoftmax(b=1.3)"])
def test_smoothing_of_every_class(member: str, classes: int, dtype: torch.dtype, fused_paths: list[LossPath]) -> None:
    """Class by class, for rows on all paths: peaks, far below the nonlinearity, high above it, far from zero."""
    heights = torch.tensor([0.0, 5.0, -30.0, 15.0, 30.0, 900.0, -900.0])[:, None]
    logits = heights + 2.0 * torch.randn(len(heights), classes)
    logits = torch.cat([logits, 3.0 * torch.randn(3, classes)]).to(dtype)
    logits[-2, -1] = 60.0
    logits[-1, 0] = 17.0
    y = torch.randint(classes, logits.shape[:1])
    y[1] = -100
    smoothing = 0.3
    leaf, exact = logits.to(DEVICE).requires_grad_(), logits.double().requires_grad_()
    options: dict[str, Any] = {"function": member, "label_smoothing": smoothing, "reduction": "sum"}
    loss = sigsoftmax.cross_entropy(leaf, y.to(DEVICE), **options, backend="triton")
    expected = sigsoftmax.cross_entropy(exact, y, **options, backend="reference")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=2.0 * torch.finfo(dtype).eps, atol=0.0)
    (found,), (right,) = gradients(loss, [leaf]), gradients(expected, [exact])
    # Of what is added up in a gradient, the part of every class is the least.
    even = 2.0 * smoothing / classes
    tolerance = 4.0 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    if dtype == torch.float16:
        even = max(even, float(torch.finfo(dtype).tiny))
    assert ((found.cpu().double() - right).abs() <= tolerance * (right.abs() + even)).all()
    assert len(fused_paths) == 1


@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_smoothing_over_a_masked_class(dtype: torch.dtype, function: str, fused_paths: list[LossPath]) -> None:
    logits = torch.randn(N, V).to(dtype)
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 0.01, "atol": 1e-6}
    logits[2, 5] = -torch.inf
    logits[3] = torch.nan
    y = target()
    y[3] = -100
    options: dict[str, Any] = {"function": function, "label_smoothing": 0.1, "reduction": "sum"}
    for ignored in (False, True):
        if ignored:
            y[2] = -100
        leaf, exact = logits.to(DEVICE).requires_grad_(), logits.double().requires_grad_()
        loss = sigsoftmax.cross_entropy(leaf, y.to(DEVICE), **options, backend="triton")
        expected = sigsoftmax.cross_entropy(exact, y, **options, backend="reference")
        assert loss.isfinite().item() is ignored
        torch.testing.assert_close(loss.cpu().double(), expected, **tolerance)
    right = gradients(expected, [exact])[0].nan_to_num(nan=0.0)
    torch.testing.assert_close(gradients(loss, [leaf])[0].cpu().double(), right, **tolerance)
    assert len(fused_paths) == 2
