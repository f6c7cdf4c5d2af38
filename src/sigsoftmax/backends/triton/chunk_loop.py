"""The chunk loop on a GPU: rows by logits kernels, sums over rows by a kernel, and scaling in one launch.

It computes losses, and log-probabilities of mixtures.

Shapes: N tokens, K components, V classes; R = n K rows of the n tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import triton
from torch import Tensor

from sigsoftmax.backends.chunked.log_probs import ChunkedLogProbs
from sigsoftmax.backends.chunked.logits import LinearLogits
from sigsoftmax.backends.chunked.loss import ChunkedLoss
from sigsoftmax.backends.chunked.path import ChunkedPath, Prior
from sigsoftmax.backends.triton import per_class_gradients, priors
from sigsoftmax.backends.triton.kernels import formulas
from sigsoftmax.backends.triton.kernels.token_losses import mixture_log_probs_kernel
from sigsoftmax.backends.triton.launch import launch
from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
from sigsoftmax.backends.triton.scaling import Scaling
from sigsoftmax.backends.triton.tuning import mixture_shape, row_parts
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LogProbsResults, Problem, Spec, first_reason
from sigsoftmax.contract.rows import RowTargets
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec


class TritonLinearLogits(LinearLogits):
    """Products whose gradients by the bias are summed by a kernel."""

    add_column_sums = staticmethod(per_class_gradients.add_column_sums)


class TritonPath(ChunkedPath[Spec]):
    """A chunk loop whose prior and sums over rows are computed by kernels, where there are some."""

    linear_logits = TritonLinearLogits

    @functools.cached_property
    def has_prior_kernel(self) -> bool:
        spec, logits = self.problem.spec.prior, self.problem.signature.operands.prior_logits
        return spec is not None and priors.has_kernel(spec, self.problem.components, logits.dtype)

    def prior(self, operands: Operands) -> Prior | None:
        spec = self.problem.spec.prior
        if spec is None or not self.has_prior_kernel:
            return super().prior(operands)
        return priors.KernelPrior(spec, self.problem.prior_logits(operands).detach())


class TritonLoss(TritonPath[LossSpec], ChunkedLoss):
    """The loss, with rows by kernels."""

    def __init__(self, problem: Problem[LossSpec], description: str = "rows by kernels") -> None:
        super().__init__(problem, LogitsKernels, description)
        self.scaling = Scaling.of(problem)

    def scale(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        self.scaling(gradients, factor)


def why_log_probs_refused(problem: Problem[LogProbsSpec]) -> str | None:
    """The reason why log-probabilities are not computed by kernels; None if they can be."""
    is_one = problem.spec.prior is None
    return first_reason({"only those of a mixture have a kernel": is_one, **priors.too_many_components(problem)})


class MixtureLogProbs(TritonPath[LogProbsSpec], ChunkedLogProbs):
    """Log-probabilities of a mixture by two kernels for each chunk: statistics of rows, and log P of every class.

    Where there are few rows, as in decoding, each is reduced in several parts. The gradient is computed by torch
    operations.
    """

    def __init__(self, problem: Problem[LogProbsSpec]) -> None:
        super().__init__(problem)
        self.description += "; their values by kernels"

    def compute(self, operands: Operands) -> LogProbsResults:
        results, prior = self.empty_results(), self.prior(operands)
        assert prior is not None
        provider, member = self.provider(operands, wants_gradient=False), self.problem.spec.member
        kernels = LogitsKernels(member.form, member.arguments(operands.arguments), provider.logits_like)
        log_prior_NK = prior.log_prior.values.float().contiguous()
        for first, logits_RV in provider.chunks():
            span = slice(first, first + logits_RV.shape[0] // provider.components)
            parts = [None if part is None else part[span] for part in results]
            rows_RV = logits_RV if kernels.per_class else provider.whole_rows(logits_RV)
            self._mix(kernels, rows_RV, log_prior_NK[span], *parts)
        return results

    def _mix(
        self,
        kernels: LogitsKernels,
        logits_RV: Tensor,
        log_prior_nK: Tensor,
        out_nV: Tensor | None,
        log_normalizer_nK: Tensor | None,
    ) -> None:
        """Write the log-probabilities of a chunk, whose rows may have masked classes at their ends."""
        assert out_nV is not None
        tokens, components = log_prior_nK.shape
        if not tokens:
            return
        rows, classes = logits_RV.shape
        parts = 1
        if logits_RV.is_contiguous() and not kernels.per_class:
            parts = row_parts(rows, classes, self.problem.device)
        stats = kernels.stats(logits_RV.view(rows * parts, -1) if parts > 1 else logits_RV, RowTargets())
        lanes, spec = triton.next_power_of_2(components), self.problem.spec
        block, warps = mixture_shape(lanes)
        blocks = -(-self.problem.num_classes // block)
        launch(
            mixture_log_probs_kernel,
            tokens * blocks,
            (
                *(logits_RV, log_prior_nK, *stats[:3], out_nV),
                stats.peak if log_normalizer_nK is None else log_normalizer_nK,
                *kernels.argument_pointers(stats.peak, 0),
            ),
            (logits_RV.stride(0), self.problem.num_classes, components, blocks, spec.floor, *kernels.values),
            {
                "FORM": formulas.CODES[kernels.form.name],
                **kernels.flags,
                "C_PER_CLASS": kernels.per_class,
                "HAS_FLOOR": spec.floor != 0,
                "HAS_NORMALIZER": log_normalizer_nK is not None,
                "PARTS": parts,
                "LANES": lanes,
                "BLOCK": block,
            },
            num_warps=warps,
        )
