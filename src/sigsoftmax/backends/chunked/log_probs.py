"""The path of log-probabilities of every class: of given logits, or of a mixture without its N x K x V.

Shapes: N tokens, K components, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.chunked.mixture import MixtureBlock
from sigsoftmax.backends.chunked.path import ChunkedPath, gradients_of_tensors, shaped
from sigsoftmax.backends.chunked.providers import LinearLogits, Source
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.spec import LogProbsSpec


class ChunkedLogProbs(ChunkedPath[LogProbsSpec]):
    """Log-probabilities by torch operations on blocks of rows, on any device."""

    def __init__(self, problem: Problem[LogProbsSpec]) -> None:
        super().__init__(problem, "rows in blocks by torch operations")

    def compute(self, operands: Operands) -> Tensor:
        source, _ = self.source(operands, wants_rows=False)
        routines = self._routines(operands, source, wants_gradient=False)
        prior = None if self.problem.spec.prior is None else self.prior(operands)
        log_prior_NK = None if prior is None else prior.log_prior()
        out_NV = source.logits_like.new_empty(source.num_tokens, source.num_classes)
        for span, _, logits_RV in source.blocks(routines.max_rows, backpropagate=False):
            if log_prior_NK is None:
                out_NV[span] = routines.rows(logits_RV).log_probs
            else:
                out_NV[span] = self._mixture(routines, logits_RV, log_prior_NK[span]).log_p_nV
        return out_NV

    def gradients(self, operands: Operands, by_log_p_NV: Tensor) -> Sequence[Tensor | None]:
        wanted, spec = self.problem.wanted, self.problem.spec
        source, by_logits_NV = self.source(operands, wants_rows=True)
        routines = self._routines(operands, source, wants_gradient=True)
        prior = None if self.problem.spec.prior is None else self.prior(operands)
        log_prior_NK = by_log_prior_NK = None
        if prior is not None:
            log_prior_NK = prior.log_prior()
            by_log_prior_NK = torch.empty_like(log_prior_NK)
        for span, first_row, logits_RV in source.blocks(routines.max_rows, backpropagate=True):
            by_log_p_nV = by_log_p_NV[span].to(routines.dtype)
            out_RV = source.gradient_rows(first_row, logits_RV)
            if log_prior_NK is None or by_log_prior_NK is None:
                f_RV = routines.rows(logits_RV).log_probs.exp_()
                by_phi_RV = by_log_p_nV - f_RV * by_log_p_nV.sum(-1, keepdim=True)
                routines.backpropagate(logits_RV, by_phi_RV, out_RV)
            else:
                block = self._mixture(routines, logits_RV, log_prior_NK[span])
                by_log_prior_NK[span] = block.gradient(by_log_p_nV, None, None, out_RV).to(by_log_prior_NK.dtype)
        by_product: Sequence[Tensor | None] = (by_logits_NV, None, None)
        if isinstance(source, LinearLogits):
            by_product = source.gradients()
        by_prior_NK = None
        if prior is not None and log_prior_NK is not None and by_log_prior_NK is not None:
            by_prior_NK = prior.gradient(log_prior_NK, by_log_prior_NK)
        gradients = (
            *by_product,
            by_prior_NK,
            None,
            *gradients_of_tensors(spec.member, routines.argument_gradients()),
            *gradients_of_tensors(spec.prior, [] if prior is None else prior.argument_gradients()),
        )
        return shaped(gradients, operands, wanted.flat)

    def _routines(self, operands: Operands, source: Source, *, wants_gradient: bool) -> FormRows:
        member = self.problem.spec.member
        needs_arguments = wants_gradient and any(self.problem.wanted.arguments)
        return FormRows(member.form, member.arguments(operands.arguments), source.logits_like, needs_arguments)

    def _mixture(self, routines: FormRows, logits_RV: Tensor, log_prior_nK: Tensor) -> MixtureBlock:
        return MixtureBlock(routines, logits_RV, log_prior_nK.to(routines.dtype), self.problem.spec.floor)
