"""Gradients times the incoming gradient, which is 1 in nearly every training step.

A GPU cannot tell its host that without a wait, but a kernel can look for itself and leave.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.backends.triton.launch import Launch
from sigsoftmax.backends.triton.tuning import multiprocessors
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.spec import LossSpec

MOST = 5
"""tensors that one launch scales"""
BLOCK = 4096


@triton.jit
def _scale(values, size, scale, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < size:
        position = start + tl.arange(0, BLOCK)
        inside = position < size
        value = tl.load(values + position, mask=inside).to(tl.float32)
        tl.store(values + position, (value * scale).to(values.dtype.element_ty), mask=inside)
        start += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit
def scale_kernel(factor, a, b, c, d, e, a_size, b_size, c_size, d_size, e_size, BLOCK: tl.constexpr):
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        _scale(a, a_size, scale, BLOCK)
        _scale(b, b_size, scale, BLOCK)
        _scale(c, c_size, scale, BLOCK)
        _scale(d, d_size, scale, BLOCK)
        _scale(e, e_size, scale, BLOCK)


class Scaling:
    """``tensor *= factor`` for contiguous tensors of these sizes, in one launch for the first :data:`MOST`.

    It is free if the factor is 1. The launch is prepared once, when it is needed for the first time.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device = sizes[:MOST], device

    @classmethod
    def of(cls, problem: Problem[LossSpec]) -> Scaling:
        """The scaling of the gradients of a loss."""
        pairs = zip(problem.signature.operands.differentiable, problem.wanted.flat, strict=True)
        return cls([tensor.numel() for tensor, want in pairs if want and tensor is not None], problem.device)

    @functools.cached_property
    def _launch(self) -> Launch | None:
        programs = min(-(-max(self.sizes) // BLOCK), 8 * multiprocessors(self.device))
        sizes = (*self.sizes, *[0] * (MOST - len(self.sizes)))
        return Launch(scale_kernel, programs, sizes, {"BLOCK": BLOCK}, num_warps=8) if programs else None

    def __call__(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        if self._launch is not None:
            self._launch(factor, *tensors[:MOST], *[factor] * (MOST - len(self.sizes)))
        for tensor in tensors[MOST:]:
            tensor.mul_(factor.to(tensor.dtype))
