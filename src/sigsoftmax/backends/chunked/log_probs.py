"""The path of log-probabilities of every class: of given logits, or of a mixture without its N x K x V.

Shapes: N tokens, K components, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.chunked.logits import LogitsProvider
from sigsoftmax.backends.chunked.mixture import MixtureBlock
from sigsoftmax.backends.chunked.path import ChunkedPath
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.spec import LogProbsSpec


class ChunkedLogProbs(ChunkedPath[LogProbsSpec]):
    """Log-probabilities by torch operations on blocks of rows, on any device."""

    def __init__(self, problem: Problem[LogProbsSpec]) -> None:
        super().__init__(problem, "rows in blocks by torch operations")

    def compute(self, operands: Operands) -> Tensor:
        provider, prior = self.provider(operands, wants_gradient=False), self.prior(operands)
        routines = self._routines(operands, provider, needs_arguments=False)
        shape = (provider.num_tokens, provider.num_classes)
        out_NV = provider.logits_like.new_empty(shape, dtype=self.problem.dtype)
        for blocks in provider.blocks(routines.max_rows):
            for tokens, _, logits_RV in blocks:
                if prior is None:
                    out_NV[tokens] = routines.rows(logits_RV).log_probs
                else:
                    out_NV[tokens] = self._mixture(routines, logits_RV, prior.log_prior_NK[tokens]).log_p_nV
        return out_NV

    def gradients(self, operands: Operands, by_log_p_NV: Tensor) -> Sequence[Tensor | None]:
        provider, prior = self.provider(operands, wants_gradient=True), self.prior(operands)
        routines = self._routines(operands, provider, needs_arguments=any(self.problem.wanted.arguments))
        by_log_prior_NK = None if prior is None else torch.empty_like(prior.log_prior_NK)
        for blocks in provider.blocks(routines.max_rows):
            for tokens, rows, logits_RV in blocks:
                by_log_p_nV = by_log_p_NV[tokens].to(routines.dtype)
                out_RV = provider.gradient_rows(rows, logits_RV)
                if prior is None or by_log_prior_NK is None:
                    f_RV = routines.rows(logits_RV).log_probs.exp_()
                    by_phi_RV = by_log_p_nV - f_RV * by_log_p_nV.sum(-1, keepdim=True)
                    routines.backpropagate(logits_RV, by_phi_RV, out_RV)
                else:
                    mixture = self._mixture(routines, logits_RV, prior.log_prior_NK[tokens])
                    by_log_f_nKV = mixture.by_log_f(by_log_p_nV)
                    by_log_prior_nK = by_log_f_nKV.sum(-1)
                    mixture.backpropagate(by_log_f_nKV, by_log_prior_nK, None, out_RV)
                    by_log_prior_NK[tokens] = by_log_prior_nK.to(by_log_prior_NK.dtype)
            provider.backpropagate()
        return self.operand_gradients(operands, provider, routines.argument_gradients(), prior, by_log_prior_NK)

    def _routines(self, operands: Operands, provider: LogitsProvider, *, needs_arguments: bool) -> FormRows:
        member = self.problem.spec.member
        return FormRows(member.form, member.arguments(operands.arguments), provider.logits_like, needs_arguments)

    def _mixture(self, routines: FormRows, logits_RV: Tensor, log_prior_nK: Tensor) -> MixtureBlock:
        return MixtureBlock(routines, logits_RV, log_prior_nK.to(routines.dtype), self.problem.spec.floor)
