"""AR and TAR and their gradients, one kernel each way.

The plain torch is ``penalties`` in ``model.regularization``.

Shapes: T time steps, B columns, H hidden features; a step has B H elements.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Penalties"]

BLOCK = 1024


@triton.jit
def forward_kernel(raw, dropped, partials, count, step, activation, temporal, BLOCK: tl.constexpr):
    """``activation`` and ``temporal`` are the weights of each square, in the means."""
    program = tl.program_id(0)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    output = tl.load(dropped + offsets, mask=mask, other=0.0).to(tl.float32)
    here = tl.load(raw + offsets, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(raw + offsets - step, mask=mask & (offsets >= step), other=0.0).to(tl.float32)
    change = tl.where(offsets >= step, here - before, 0.0)
    tl.store(partials + program, tl.sum(activation * output * output + temporal * change * change))


@triton.jit
def backward_kernel(
    raw, dropped, gradient, raw_gradient, dropped_gradient, count, step, activation, temporal, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    outer = 2.0 * tl.load(gradient)
    output = tl.load(dropped + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dropped_gradient + offsets, outer * activation * output, mask=mask)
    has_before, has_after = mask & (offsets >= step), offsets + step < count
    here = tl.load(raw + offsets, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(raw + offsets - step, mask=has_before, other=0.0).to(tl.float32)
    after = tl.load(raw + offsets + step, mask=has_after, other=0.0).to(tl.float32)
    change = tl.where(has_before, here - before, 0.0) - tl.where(has_after, after - here, 0.0)
    tl.store(raw_gradient + offsets, outer * temporal * change, mask=mask)


class Penalties(torch.autograd.Function):
    """A float32 scalar; gradients have the dtypes of their tensors."""

    @staticmethod
    def forward(
        ctx: Any, raw_TBH: Tensor, dropped_TBH: Tensor, activation: float, temporal_activation: float
    ) -> Tensor:
        raw_TBH, dropped_TBH = raw_TBH.contiguous(), dropped_TBH.contiguous()
        count, step = raw_TBH.numel(), raw_TBH[0].numel()
        temporal = temporal_activation / (count - step) if count > step else 0.0
        ctx.save_for_backward(raw_TBH, dropped_TBH)
        ctx.numbers = (count, step, activation / count, temporal)
        partials = torch.empty(triton.cdiv(count, BLOCK), device=raw_TBH.device)
        forward_kernel[(partials.numel(),)](raw_TBH, dropped_TBH, partials, *ctx.numbers, BLOCK=BLOCK)
        return partials.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        raw_TBH, dropped_TBH = ctx.saved_tensors
        gradients = torch.empty_like(raw_TBH), torch.empty_like(dropped_TBH)
        backward_kernel[(triton.cdiv(raw_TBH.numel(), BLOCK),)](
            raw_TBH, dropped_TBH, gradient, *gradients, *ctx.numbers, BLOCK=BLOCK
        )
        return *gradients, None, None
