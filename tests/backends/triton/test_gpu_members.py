"""Every member in every dtype through the public losses, on a GPU, over one table of shapes and kinds of logits.

The error of each gradient is bounded by that of the reference in plain torch: same dtype, same device, same inputs.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.tables import MEMBERS, Member, frobenius_error
from torch import Tensor

import sigsoftmax

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not IS_INTERPRETED:
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [torch.float32, torch.float16, *([] if IS_INTERPRETED else [torch.bfloat16])]
SLACK = 1.5
"""The most that an error may be relative to plain torch's, besides two roundings of the result."""
ROUNDINGS = 8.0
"""The number of roundings of float32 that an error may have besides."""
EPS = torch.finfo(torch.float32).eps
LARGEST = 40.0
"""sizes of the logits"""
D, K = 24, 2
SHAPES = [(1, 2), (33, 2), (1, 129), (70, 1_003), (5, 50_257)]
if IS_INTERPRETED:
    SHAPES = [(1, 2), (3, 2), (1, 129), (5, 131)]
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "deviation 1": lambda z: z,
    "deviation 3": lambda z: 3.0 * z,
    "peaked": lambda z: z + 16.0 * (torch.rand_like(z) < 1.5 / z.shape[-1]),
    "all negative": lambda z: z - 30.0,
}
every_member = pytest.mark.parametrize("member", [m for m in MEMBERS if m.registers is None], ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bounded(
    member: Member, classes: int, leaves: dict[str, Tensor], loss: Callable[..., Tensor], dtype: torch.dtype, what: str
) -> None:
    """Loss and gradients of inputs and learned parameters; ``loss`` takes them, a function and a backend."""

    def results(backend: str, precision: torch.dtype) -> dict[str, Tensor]:
        own = {name: leaf.detach().to(precision).requires_grad_() for name, leaf in leaves.items()}
        wide = torch.promote_types(precision, torch.float32)
        learned = {
            name: value.detach().to(DEVICE, wide).requires_grad_()
            for name, value in member.learned(classes, torch.float32).items()
        }
        value = loss(**own, function=member.make(classes, **learned), backend=backend)
        inputs = own | learned
        found = dict(zip(inputs, torch.autograd.grad(value, list(inputs.values())), strict=True))
        return {"loss": value.detach(), **found}

    truth, plain, ours = results("reference", torch.float64), results("reference", dtype), results("triton", dtype)
    for name, found in ours.items():
        assert found.dtype == plain[name].dtype
        exact = truth[name].double()
        info = torch.finfo(found.dtype)
        # What is summed has the size of 1, or of logits for parameters, and may cancel; small numbers underflow.
        summed = ROUNDINGS * EPS * (1.0 if name in leaves else LARGEST)
        rounded = 2.0 * info.eps * float(exact.norm()) + info.smallest_normal * info.eps * found.numel() ** 0.5
        bound = SLACK * frobenius_error(plain[name], exact) + summed + rounded
        assert frobenius_error(found, exact) <= bound, f"{what}: {name}"


def tables() -> Iterator[tuple[str, int, int, Callable[[Tensor], Tensor]]]:
    for tokens, classes in SHAPES:
        for kind, change in KINDS.items():
            yield f"N={tokens} V={classes}, {kind}", tokens, classes, change


def targets(tokens: int, classes: int) -> Tensor:
    y = torch.randint(classes, (tokens,), device=DEVICE)
    y[-1] = classes - 1
    y[1::7] = -100
    return y


@every_dtype
@every_member
def test_given_logits(member: Member, dtype: torch.dtype) -> None:
    for what, tokens, classes, change in tables():
        logits = change(torch.randn(tokens, classes, device=DEVICE)).to(dtype)
        y = targets(tokens, classes)

        def loss(logits: Tensor, y: Tensor = y, **options: Any) -> Tensor:
            return sigsoftmax.cross_entropy(logits, y, **options)

        bounded(member, classes, {"logits": logits}, loss, dtype, what)


@every_dtype
@every_member
def test_products(member: Member, dtype: torch.dtype) -> None:
    """Three chunks of tokens; the bias makes the logits what the table asks for."""
    for what, tokens, classes, change in tables():
        leaves = {
            "hidden": torch.randn(tokens, D, device=DEVICE).to(dtype),
            "weight": (torch.randn(classes, D, device=DEVICE) / D**0.5).to(dtype),
            "bias": change(torch.randn(classes, device=DEVICE)).to(dtype),
        }
        y = targets(tokens, classes)
        chunk = max(1, tokens // 3) * classes * dtype.itemsize

        def loss(
            hidden: Tensor, weight: Tensor, bias: Tensor, y: Tensor = y, chunk: int = chunk, **options: Any
        ) -> Tensor:
            return sigsoftmax.linear_cross_entropy(hidden, weight, y, linear_bias=bias, chunk_bytes=chunk, **options)

        bounded(member, classes, leaves, loss, dtype, what)


@every_dtype
@every_member
def test_mixtures(member: Member, dtype: torch.dtype) -> None:
    for what, tokens, classes, change in tables():
        leaves = {
            "hidden": torch.randn(tokens, K, D, device=DEVICE).to(dtype),
            "prior": torch.randn(tokens, K, device=DEVICE).to(dtype),
            "weight": (torch.randn(classes, D, device=DEVICE) / D**0.5).to(dtype),
            "bias": change(torch.randn(classes, device=DEVICE)).to(dtype),
        }
        y = targets(tokens, classes)
        chunk = max(1, tokens // 3) * K * classes * dtype.itemsize

        def loss(
            hidden: Tensor, prior: Tensor, weight: Tensor, bias: Tensor, y: Tensor = y, chunk: int = chunk, **more: Any
        ) -> Tensor:
            return sigsoftmax.mixture_cross_entropy(
                hidden, prior, weight, y, linear_bias=bias, chunk_bytes=chunk, prior_function="softmax", **more
            )

        bounded(member, classes, leaves, loss, dtype, what)


@every_dtype
@every_member
@pytest.mark.parametrize("classes", [2, 1_003])
def test_no_tokens(member: Member, dtype: torch.dtype, classes: int) -> None:
    y = torch.empty(0, dtype=torch.int64, device=DEVICE)
    hidden = torch.empty(0, D, dtype=dtype, device=DEVICE, requires_grad=True)
    weight = torch.randn(classes, D, device=DEVICE).to(dtype).requires_grad_()
    logits = torch.empty(0, classes, dtype=dtype, device=DEVICE, requires_grad=True)
    mixed = torch.empty(0, K, D, dtype=dtype, device=DEVICE, requires_grad=True)
    prior = torch.empty(0, K, dtype=dtype, device=DEVICE, requires_grad=True)
    options: Any = {"function": member.make(classes), "backend": "triton", "reduction": "sum"}
    losses = {
        sigsoftmax.cross_entropy(logits, y, **options): (logits,),
        sigsoftmax.linear_cross_entropy(hidden, weight, y, **options): (hidden, weight),
        sigsoftmax.mixture_cross_entropy(mixed, prior, weight, y, **options): (mixed, prior, weight),
    }
    for loss, leaves in losses.items():
        assert loss == 0
        for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            assert gradient.shape == leaf.shape
            assert (gradient == 0).all()
