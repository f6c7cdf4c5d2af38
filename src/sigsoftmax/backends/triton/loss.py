"""The chunk loop on a GPU: rows by logits kernels, sums over rows by a kernel, and scaling in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sigsoftmax.backends.chunked.logits import LinearLogits
from sigsoftmax.backends.chunked.loss import ChunkedLoss
from sigsoftmax.backends.chunked.path import Prior
from sigsoftmax.backends.triton import column_sums, priors
from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
from sigsoftmax.backends.triton.scaling import Scaling
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.spec import LossSpec


class TritonLinearLogits(LinearLogits):
    """Products whose gradients by the bias are summed by a kernel."""

    add_column_sums = staticmethod(column_sums.add_column_sums)


class TritonLoss(ChunkedLoss):
    """The chunk loop, with rows by kernels."""

    linear_logits = TritonLinearLogits

    def __init__(self, problem: Problem[LossSpec], description: str = "rows by kernels") -> None:
        super().__init__(problem, LogitsKernels, description)
        self.refused: dict[str, str] = {}
        """faster paths, and why they were refused"""
        self.scaling = Scaling.of(problem)
        spec, logits = problem.spec.prior, problem.signature.operands.prior_logits
        self.has_prior_kernel = spec is not None and priors.has_kernel(spec, problem.components, logits.dtype)

    def scale(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        self.scaling(gradients, factor)

    def prior(self, operands: Operands) -> Prior | None:
        spec = self.problem.spec.prior
        if spec is None or not self.has_prior_kernel:
            return super().prior(operands)
        return priors.KernelPrior(spec, self.problem.prior_logits(operands).detach())
