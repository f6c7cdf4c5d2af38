"""The path of log-probabilities of every class: of given logits, or of a mixture without its N x K x V.

Shapes: N tokens, K components, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.chunked.loss import ChunkedLoss, Prior, describe_logits, shaped
from sigsoftmax.backends.chunked.mixture import MixtureBlock
from sigsoftmax.backends.chunked.providers import GivenLogits, LinearLogits, Source
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.spec import LogProbsSpec


class ChunkedLogProbs:
    """Log-probabilities by torch operations on blocks of rows, on any device."""

    def __init__(self, problem: Problem[LogProbsSpec]) -> None:
        self.problem = problem
        self.description = f"{describe_logits(problem)}, rows in blocks by torch operations"

    def compute(self, operands: Operands) -> Tensor:
        source, _ = self._source(operands, wants_gradient=False)
        routines, prior = self._routines(operands, source, wants_gradient=False), self._prior(operands)
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
        source, by_logits_NV = self._source(operands, wants_gradient=True)
        routines, prior = self._routines(operands, source, wants_gradient=True), self._prior(operands)
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
        of_tensors = ChunkedLoss.gradients_of_tensors
        gradients = (
            *by_product,
            by_prior_NK,
            None,
            *of_tensors(spec.member, routines.argument_gradients()),
            *of_tensors(spec.prior, [] if prior is None else prior.argument_gradients()),
        )
        return shaped(gradients, operands, wanted.flat)

    def _source(self, operands: Operands, *, wants_gradient: bool) -> tuple[Source, Tensor | None]:
        problem, wanted = self.problem, self.problem.wanted
        hidden_NKd = problem.hidden(operands)
        if operands.weight is None:
            logits_NV = hidden_NKd.squeeze(1)
            by_logits_NV = logits_NV.new_empty(logits_NV.shape) if wants_gradient else None
            return GivenLogits(logits_NV, by_logits_NV), by_logits_NV
        dtype = gradient_dtype = problem.product_dtype
        if wants_gradient:
            arguments = problem.spec.member.arguments(operands.arguments)
            gradient_dtype = normalizing.gradient_dtype(problem.spec.member, arguments, dtype)
        source = LinearLogits(
            hidden_NKd,
            operands.weight,
            operands.bias,
            dtype,
            problem.chunk_bytes,
            needs_hidden=wants_gradient and wanted.input,
            needs_weight=wants_gradient and wanted.weight,
            needs_bias=wants_gradient and wanted.bias,
            gradient_dtype=gradient_dtype,
        )
        return source, None

    def _routines(self, operands: Operands, source: Source, *, wants_gradient: bool) -> FormRows:
        member = self.problem.spec.member
        needs_arguments = wants_gradient and any(self.problem.wanted.arguments)
        return FormRows(member.form, member.arguments(operands.arguments), source.logits_like, needs_arguments)

    def _prior(self, operands: Operands) -> Prior | None:
        spec = self.problem.spec.prior
        if spec is None:
            return None
        logits_NK = self.problem.prior_logits(operands).detach()
        return Prior(spec, logits_NK, operands.prior_arguments, any(self.problem.wanted.prior_arguments))

    def _mixture(self, routines: FormRows, logits_RV: Tensor, log_prior_nK: Tensor) -> MixtureBlock:
        return MixtureBlock(routines, logits_RV, log_prior_nK.to(routines.dtype), self.problem.spec.floor)
