"""Software-pipelined rows, against the reference in float64. Tiles are small here, and so rows of many are not long.

Shapes: N tokens, V classes, d width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.backends.triton.device import DEVICE
from tests.tables import gradients
from torch import Tensor

import sigsoftmax
from sigsoftmax.backends.triton import fused_loss, logits_kernels, tuning
from sigsoftmax.backends.triton.kernels import fused_loss as fused_kernels
from sigsoftmax.backends.triton.kernels import pipelined_row
from sigsoftmax.backends.triton.launch import Launch
from sigsoftmax.backends.triton.tuning import LaunchShape

LANES = 128
CLASSES = [4 * LANES, 4 * LANES + 8, 1000, 8 * LANES, 5000]
"""one group of four tiles, one and a little, and several"""
HEIGHTS = torch.tensor([0.0, 3.0, 5.0, -30.0, 15.0, 30.0, 900.0, -900.0])
"""mean logits of rows: on the fast path, below and above where it holds, and far from zero"""
pytestmark = pytest.mark.usefixtures("_fresh_memory_is_nan", "fused_paths")
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """True for each launch that was pipelined."""
    found: list[bool] = []
    original = Launch.__call__

    def call(self: Launch, *tensors: Tensor) -> None:
        is_fused = self.kernel in (fused_kernels.loss_kernel, fused_kernels.pipelined_kernel)
        if is_fused or "IS_PIPELINED" in self.constants:
            found.append(self.constants.get("IS_PIPELINED", self.kernel is fused_kernels.pipelined_kernel))
        original(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", call)

    def shape(*row: Any, **launches: bool) -> LaunchShape:
        return LaunchShape(LANES, 4, 1)

    for module in (fused_loss, logits_kernels):
        monkeypatch.setattr(module, "softmax_shape", shape)
    monkeypatch.setattr(tuning, "tuned_pipelined_shape", shape)
    return found


def some_logits(classes: int, dtype: torch.dtype) -> Tensor:
    """Logits of more rows than programs."""
    logits = HEIGHTS[:, None] + 2.0 * torch.randn(len(HEIGHTS), classes)
    logits = torch.cat([3.0 * torch.randn(3, classes), logits, 3.0 * torch.randn(5, classes)])
    # A first tile off the fast path, in a row on it; far above the first tile; within it; and one that says nothing.
    logits[-5, :LANES] -= 40.0
    logits[-4, -1] = 60.0
    logits[-3, 0] = 17.0
    logits[-2, :LANES] = -torch.inf
    return logits.to(dtype)


def check(logits: Tensor, target: Tensor, tolerance: float, **options: Any) -> None:
    leaf, exact = logits.to(DEVICE).requires_grad_(), logits.double().requires_grad_()
    on_device = {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in options.items()}
    loss = sigsoftmax.cross_entropy(leaf, target.to(DEVICE), **on_device, backend="triton")
    expected = sigsoftmax.cross_entropy(exact, target, **options, backend="reference")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=torch.finfo(loss.dtype).eps, atol=1e-5)
    upstream = torch.rand_like(expected)
    (found,), (right,) = gradients(loss, [leaf], upstream.to(loss)), gradients(expected, [exact], upstream)
    least = float(torch.finfo(logits.dtype).smallest_normal)
    assert ((found.cpu().double() - right).abs() <= tolerance * right.abs() + least + 1e-7).all()


@pytest.mark.grid
@every_dtype
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("member", ["softmax(alpha=0.7)", "sigsoftmax", "shifted_sigsoftmax(b=1.3)"])
def test_every_class(member: str, classes: int, dtype: torch.dtype, launched: list[bool]) -> None:
    logits = some_logits(classes, dtype)
    y = torch.randint(classes, logits.shape[:1])
    check(logits, y, 1.5 * torch.finfo(dtype).eps, function=member, reduction="sum")
    assert launched == [True]


@every_dtype
@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("z_loss", [0.0, 0.2])
def test_rows_that_do_not_count(z_loss: float, function: str, dtype: torch.dtype, launched: list[bool]) -> None:
    """A large z-loss makes the gradient of rows far below zero negative."""
    logits = some_logits(1000, dtype)
    y = torch.randint(1000, logits.shape[:1])
    y[::3] = -100
    logits[3] = torch.nan
    logits[6, :5] = torch.inf
    finite = logits.clone()
    finite[[3, 6]] = 0.0
    leaf, exact = logits.to(DEVICE).requires_grad_(), finite.double().requires_grad_()
    options: dict[str, Any] = {"function": function, "z_loss": z_loss}
    loss = sigsoftmax.cross_entropy(leaf, y.to(DEVICE), **options, backend="triton")
    expected = sigsoftmax.cross_entropy(exact, y, **options, backend="reference")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    (found,), (right,) = gradients(loss, [leaf]), gradients(expected, [exact])
    assert not found[::3].any()
    torch.testing.assert_close(found.cpu().double(), right, rtol=1.5 * torch.finfo(dtype).eps, atol=1e-6)
    assert launched == [True]


@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.thorough)])
def test_rows_that_several_programs_finish(reduction: str, launched: list[bool]) -> None:
    tokens = 2 * fused_loss.FINISHED_ROWS + 5
    logits = (2.0 * torch.randn(tokens, 4 * LANES)).bfloat16()
    y = torch.randint(4 * LANES, (tokens,))
    y[7::50] = -100
    check(logits, y, 1.5 * torch.finfo(logits.dtype).eps, function="sigsoftmax", reduction=reduction, z_loss=1e-3)
    assert launched == [True]


def test_the_mean_of_no_token(launched: list[bool]) -> None:
    logits = torch.randn(6, 1000, device=DEVICE).bfloat16().requires_grad_()
    y = torch.full((6,), -100, device=DEVICE)
    loss = sigsoftmax.cross_entropy(logits, y, function="sigsoftmax", backend="triton")
    assert loss.isnan()
    (gradient,) = gradients(loss, [logits])
    assert not gradient.any()
    assert launched == [True]


@pytest.mark.grid
@every_dtype
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
def test_losses_that_are_not_fused(function: str, classes: int, dtype: torch.dtype, launched: list[bool]) -> None:
    logits = some_logits(classes, dtype)
    y = torch.randint(classes, logits.shape[:1])
    y[1] = -100
    weights = torch.rand(len(logits))
    weights[::4] = 0.0
    weights[[1, 2]] = -0.5
    check(logits, y, 2.0 * torch.finfo(dtype).eps, function=function, token_weights=weights, reduction="sum")
    assert launched == [True]


@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
def test_gradients_in_place(function: str, launched: list[bool]) -> None:
    """A chunk of logits becomes its gradient; not by a fused path, which reads targets after that."""
    hidden, weight, y = torch.randn(11, 8), torch.randn(1024, 8), torch.randint(1024, (11,))
    token_weights = torch.rand(11)
    found: dict[str, list[Tensor]] = {}
    for backend in ("triton", "reference"):
        place = DEVICE if backend == "triton" else "cpu"
        dtype = torch.bfloat16 if backend == "triton" else torch.float64
        leaves = [t.bfloat16().to(place, dtype).requires_grad_() for t in (hidden, weight)]
        options: dict[str, Any] = {"token_weights": token_weights.to(place), "reduction": "sum", "backend": backend}
        loss = sigsoftmax.linear_cross_entropy(*leaves, y.to(place), function=function, **options)
        found[backend] = [g.cpu().double() for g in gradients(loss, leaves)]
    for a, b in zip(found["triton"], found["reference"], strict=True):
        assert (a - b).norm() <= 0.01 * b.norm()
    assert launched == [True]
    leaves = [t.bfloat16().to(DEVICE).requires_grad_() for t in (hidden, weight)]
    sigsoftmax.linear_cross_entropy(*leaves, y.to(DEVICE), function=function, backend="triton")
    assert launched == [True, False]


@every_dtype
@pytest.mark.parametrize("is_fused", [True, False])
def test_logits_at_a_misaligned_address(is_fused: bool, dtype: torch.dtype, launched: list[bool]) -> None:
    memory = torch.randn(6 * 1000 + 4).to(DEVICE, dtype)
    y = torch.randint(1000, (6,), device=DEVICE)
    options = {} if is_fused else {"token_weights": torch.rand(6, device=DEVICE), "reduction": "sum"}
    results = []
    for begin in (4, 0, 4):
        if not begin:
            memory = memory.roll(-4)
        leaf = memory[begin : begin + 6000].view(6, 1000).requires_grad_()
        loss = sigsoftmax.cross_entropy(leaf, y, function="sigsoftmax", backend="triton", **options)
        results.append((loss.detach(), *gradients(loss, [leaf])))
        if not begin:
            memory = memory.roll(4)
    assert launched == [False, True, False]
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(gradient, results[0][1], rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("classes", "dtype", "options"),
    [
        *((1001, torch.bfloat16, o) for o in ("mean", "token weights")),
        *((1004, torch.bfloat16, o) for o in ("mean", "token weights")),
        *((4 * LANES - 8, torch.bfloat16, o) for o in ("mean", "token weights")),
        *((1000, torch.float32, o) for o in ("mean", "token weights")),
        (1000, torch.bfloat16, "label smoothing"),
    ],
)
def test_other_rows_are_not_pipelined(classes: int, dtype: torch.dtype, options: str, launched: list[bool]) -> None:
    logits = torch.randn(9, classes).to(dtype)
    chosen: dict[str, Any] = {
        "mean": {},
        "token weights": {"token_weights": torch.rand(9), "reduction": "sum"},
        "label smoothing": {"label_smoothing": 0.1},
    }[options]
    check(logits, torch.randint(classes, (9,)), 0.02, function="sigsoftmax", **chosen)
    assert launched == [False]


@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
def test_a_row_of_no_weight_may_be_anything(function: str, launched: list[bool]) -> None:
    logits = torch.randn(6, 1000, device=DEVICE).bfloat16()
    logits[1], logits[4, 700] = torch.nan, torch.inf
    logits.requires_grad_()
    y, weights = torch.full((6,), 700, device=DEVICE), torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 1.0], device=DEVICE)
    options: dict[str, Any] = {"function": function, "token_weights": weights, "reduction": "sum", "backend": "triton"}
    loss = sigsoftmax.cross_entropy(logits, y, **options)
    (gradient,) = gradients(loss, [logits])
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[[1, 4]].any()
    assert gradient[0].any()
    assert launched == [True]


@pytest.mark.parametrize(
    ("dtype", "masked"),
    [(torch.bfloat16, pipelined_row.TWO_MASKED_BFLOAT16), (torch.float16, pipelined_row.TWO_MASKED_FLOAT16)],
    ids=str,
)
def test_masked_pairs(dtype: torch.dtype, masked: Any) -> None:
    """Others would be found out in the sum, and the row be reduced once more."""
    assert torch.full((2,), -torch.inf, dtype=dtype).view(torch.int32).item() == masked.value


def test_rows_that_are_only_reduced_are_not_pipelined(launched: list[bool]) -> None:
    logits, y = torch.randn(9, 1000), torch.randint(1000, (9,))
    loss = sigsoftmax.cross_entropy(logits.bfloat16().to(DEVICE), y.to(DEVICE), function="sigsoftmax", backend="triton")
    expected = sigsoftmax.cross_entropy(logits.bfloat16().double(), y, function="sigsoftmax", backend="reference")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)
    assert launched == [False]
