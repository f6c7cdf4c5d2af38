"""What all losses on a GPU share: rows by kernels, sums over rows by a kernel, and scaling in one launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.loss import ChunkedLoss
from sigsoftmax.backends.chunked.path import Prior
from sigsoftmax.backends.chunked.providers import LinearLogits
from sigsoftmax.backends.triton import columns, priors, rows, scaling
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.spec import LossSpec


class TritonLinearLogits(LinearLogits):
    """Products whose gradients by the bias are summed by a kernel."""

    def add_to_bias(self, by_bias_V: Tensor, by_logits_RV: Tensor, *, is_first: bool) -> None:
        if by_bias_V.dtype != torch.float32 or by_logits_RV.device.type != "cuda":
            super().add_to_bias(by_bias_V, by_logits_RV, is_first=is_first)
            return
        for piece_RV, by_bias in self.pieces(by_logits_RV, by_bias_V):
            columns.add_column_sums(by_bias, piece_RV, is_first=is_first)


class Scaler:
    """Gradients times the incoming gradient, for all calls of one signature; the launch is prepared once."""

    def __init__(self, problem: Problem[LossSpec]) -> None:
        wanted, operands = problem.wanted, problem.signature.operands
        pairs = zip(operands.differentiable, wanted.flat, strict=True)
        sizes = [tensor.numel() for tensor, want in pairs if want and tensor is not None]
        self.device = problem.device
        self.sizes = sizes[: scaling.MOST]

    @functools.cached_property
    def first(self) -> scaling.Scaling:
        return scaling.Scaling(self.sizes, self.device)

    def __call__(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        self.first(gradients[: scaling.MOST], factor)
        for gradient in gradients[scaling.MOST :]:
            gradient.mul_(factor.to(gradient.dtype))


class TritonLoss(ChunkedLoss):
    """The chunk loop, with rows by kernels."""

    linear_logits = TritonLinearLogits

    def __init__(self, problem: Problem[LossSpec], description: str = "rows by kernels") -> None:
        super().__init__(problem, rows.routines, description)
        self.refused: dict[str, str] = {}
        """faster paths, and why they were refused"""
        self.scaler = Scaler(problem)
        spec, logits = problem.spec.prior, problem.signature.operands.prior_logits
        self.has_prior_kernel = spec is not None and priors.has_kernel(spec, problem.components, logits.dtype)

    def scale(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        self.scaler(gradients, factor)

    def prior(self, operands: Operands) -> Prior:
        spec = self.problem.spec.prior
        if spec is None or not self.has_prior_kernel:
            return super().prior(operands)
        return priors.KernelPrior(spec, self.problem.prior_logits(operands).detach())
