"""Log-probabilities of every class, a block of rows at a time and backwards, and the path that returns them.

The path of token statistics (``statistics``) is made of the same blocks.

Shapes: N tokens, K components, V classes; n tokens of a block, R = n K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.chunked.logits import LogitsProvider
from sigsoftmax.backends.chunked.mixture import MixtureBlock
from sigsoftmax.backends.chunked.path import ChunkedPath, Prior
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LogProbsResults, Problem, Spec
from sigsoftmax.contract.rows import Logarithms, compute_dtype
from sigsoftmax.contract.spec import LogProbsSpec
from sigsoftmax.contract.statistics import LogProbsGradient
from sigsoftmax.contract.tokens import common_unit

ROWS = "rows in blocks by torch operations"
"""The description of such paths."""


class PlainBlock:
    """The log-probability of every class for a block of rows without a prior, and its gradient."""

    def __init__(self, routines: FormRows, logits_RV: Tensor) -> None:
        self.routines, self.logits_RV = routines, logits_RV
        rows = routines.rows(logits_RV)
        self.log_p_nV = rows.log_probs
        self.log_normalizer_nK = rows.log_normalizer.unsqueeze(-1)

    def backpropagate(self, by: LogProbsGradient, out_RV: Tensor) -> Tensor | None:
        """Write dL/dlogits; return dL/dlog prior, which there is none of."""
        minus_n1 = by.by_log_p_nV.sum(-1, keepdim=True)
        if by.by_normalizer_nK is not None:
            minus_n1 = minus_n1 - by.by_normalizer_nK
        by_phi_nV = by.by_log_p_nV - self.log_p_nV.exp() * minus_n1
        if by.unused_n1 is not None:
            by_phi_nV.masked_fill_(by.unused_n1, 0.0)
        self.routines.backpropagate(self.logits_RV, by_phi_nV, out_RV)
        return None


class MixedBlock:
    """The same of a mixture."""

    def __init__(self, routines: FormRows, logits_RV: Tensor, log_prior: Logarithms, floor: float) -> None:
        unit = common_unit(log_prior.unit, routines.unit)
        log_prior = Logarithms(log_prior.over(unit).to(routines.dtype), unit)
        self.mixture = MixtureBlock(routines, logits_RV, log_prior, floor)
        self.log_p_nV = self.mixture.log_p.values
        self.log_normalizer_nK = self.mixture.log_normalizer_nK

    def backpropagate(self, by: LogProbsGradient, out_RV: Tensor) -> Tensor | None:
        """Write dL/dlogits; return dL/dlog prior."""
        by_log_f_nKV = self.mixture.by_log_f(by.by_log_p_nV)
        by_log_prior_nK = by_log_f_nKV.sum(-1)
        minus_nK = by_log_prior_nK if by.by_normalizer_nK is None else by_log_prior_nK - by.by_normalizer_nK
        self.mixture.backpropagate(by_log_f_nKV, minus_nK, by.unused_n1, out_RV)
        return by_log_prior_nK if by.unused_n1 is None else by_log_prior_nK.masked_fill(by.unused_n1, 0.0)


class EveryClassPath(ChunkedPath[Spec]):
    """Something of the log-probability of every class, by torch operations on blocks of rows, on any device."""

    def log_probs_of_blocks(self, operands: Operands) -> Iterator[tuple[slice, PlainBlock | MixedBlock]]:
        """The tokens of each block, and the log-probability of every class for them."""
        provider, prior = self.provider(operands, wants_gradient=False), self.prior(operands)
        routines = self._routines(operands, provider, needs_arguments=False)
        for blocks in provider.blocks(self.max_rows(routines)):
            for tokens, _, logits_RV in blocks:
                yield tokens, self._block(routines, tokens, logits_RV, prior)

    def backpropagated(
        self, operands: Operands, by_log_p: Callable[[slice, Tensor], LogProbsGradient]
    ) -> Sequence[Tensor | None]:
        """Gradients of the operands, given the derivatives by the log-probabilities of each block."""
        provider, prior = self.provider(operands, wants_gradient=True), self.prior(operands)
        routines = self._routines(operands, provider, needs_arguments=any(self.problem.wanted.arguments))
        by_log_prior_NK = None if prior is None else torch.empty_like(prior.log_prior.multiples)
        for blocks in provider.blocks(self.max_rows(routines)):
            for tokens, rows, logits_RV in blocks:
                block = self._block(routines, tokens, logits_RV, prior)
                out_RV = provider.gradient_rows(rows, logits_RV)
                by_log_prior_nK = block.backpropagate(by_log_p(tokens, block.log_p_nV), out_RV)
                if by_log_prior_NK is not None and by_log_prior_nK is not None:
                    by_log_prior_NK[tokens] = by_log_prior_nK.to(by_log_prior_NK.dtype)
            provider.backpropagate()
        return self.operand_gradients(operands, provider, routines.argument_gradients(), prior, by_log_prior_NK)

    def _routines(self, operands: Operands, provider: LogitsProvider, *, needs_arguments: bool) -> FormRows:
        member = self.problem.spec.member
        return FormRows(member.form, member.arguments(operands.arguments), provider.logits_like, needs_arguments)

    def max_rows(self, routines: FormRows) -> int | None:
        """The most rows of a block; None for a whole chunk."""
        return routines.max_rows

    def _block(
        self, routines: FormRows, tokens: slice, logits_RV: Tensor, prior: Prior | None
    ) -> PlainBlock | MixedBlock:
        if prior is None:
            return PlainBlock(routines, logits_RV)
        log_prior = prior.log_prior._replace(multiples=prior.log_prior.multiples[tokens])
        return MixedBlock(routines, logits_RV, log_prior, self.problem.spec.floor)


class ChunkedLogProbs(EveryClassPath[LogProbsSpec]):
    """Log-probabilities by torch operations on blocks of rows, on any device."""

    def __init__(self, problem: Problem[LogProbsSpec]) -> None:
        super().__init__(problem, ROWS)

    def compute(self, operands: Operands) -> LogProbsResults:
        results = self.empty_results()
        for tokens, block in self.log_probs_of_blocks(operands):
            results.log_probs_NV[tokens] = block.log_p_nV
            if results.log_normalizer_NK is not None:
                results.log_normalizer_NK[tokens] = block.log_normalizer_nK
        return results

    def empty_results(self) -> LogProbsResults:
        """Memory for the results."""
        problem, tokens = self.problem, self.problem.num_tokens
        log_normalizer_NK = None
        if problem.spec.extras:
            shape = (tokens, problem.components)
            log_normalizer_NK = torch.empty(shape, dtype=problem.compute_dtype, device=problem.device)
        log_probs_NV = torch.empty(tokens, problem.num_classes, dtype=problem.dtype, device=problem.device)
        return LogProbsResults(log_probs_NV, log_normalizer_NK)

    def gradients(self, operands: Operands, by_log_p_NV: Tensor) -> Sequence[Tensor | None]:
        dtype = compute_dtype(self.problem.product_dtype)
        return self.backpropagated(operands, lambda tokens, _: LogProbsGradient(by_log_p_NV[tokens].to(dtype)))
