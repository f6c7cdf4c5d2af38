"""The arithmetic of token statistics: what is reported of a token's distribution, and the derivatives by it.

All statistics of a token are columns of one matrix, so that an operation has one differentiable result: the
log-probability of the target, the entropy, the log normaliser of each component, and the log-probabilities of the
likeliest classes. Those that are not asked for have no column. Classes are the columns of another matrix: the likeliest
one, and the likeliest ``topk``.

With log p of every class and a temperature T, the distribution is q = p^(1/T) / sum p^(1/T). The derivatives are

    dH / dlog q_j = -q_j log q_j,    dL / dlog p_j = (dL / dlog q_j - q_j sum_m dL / dlog q_m) / T

for normalised q: a multiple of q itself may be added to the first, since it leads nowhere.

Shapes: N tokens, n of a block, K components, V classes, T likeliest classes, C columns of numbers, I of classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.spec import StatisticsSpec
from sigsoftmax.contract.tokens import entropy


class TokenStatistics(NamedTuple):
    """Statistics of each token's distribution, in the leading dimensions; None where one was not asked for."""

    log_probs: Tensor | None
    """log-probability of the target; 0 for an ignored one"""
    entropy: Tensor | None
    """-sum_j p_j log p_j, in nats"""
    log_normalizer: Tensor
    """log sum_j g(z_j), before the temperature; for a mixture one per component, (..., K)"""
    topk_log_probs: Tensor | None
    """log-probabilities of the likeliest classes, largest first, (..., topk)"""
    topk_indices: Tensor | None
    """the likeliest classes, (..., topk)"""
    argmax: Tensor | None = None
    """the likeliest class"""


GROUPS = 4
"""groups of columns: that of targets, of entropies, of normalisers, and of the likeliest classes"""


class LogProbsGradient(NamedTuple):
    """Derivatives of a loss by what is known of the rows of a block."""

    by_log_p_nV: Tensor
    """by the log-probability of every class"""
    by_normalizer_nK: Tensor | None = None
    """by the log normaliser of every row"""
    unused_n1: Tensor | None = None
    """Tokens that the loss does not depend on: their gradient is 0, even where their logits are NaN."""


class StatisticsArithmetic:
    """The formulas of one call, for a block of tokens at a time."""

    def __init__(self, problem: Problem[StatisticsSpec]) -> None:
        self.spec = spec = problem.spec
        self.has_target = problem.signature.operands.target is not None
        self.widths = (int(self.has_target), int(spec.entropy), problem.components, spec.topk)
        self.columns = sum(self.widths)
        self.index_columns = int(spec.argmax) + spec.topk

    def groups(self, values_NC: Tensor) -> tuple[Tensor, ...]:
        """The columns of each group; a group that is not asked for has none."""
        return values_NC.split(self.widths, -1)

    def joined(self, groups: Sequence[Tensor | None]) -> Tensor:
        """The inverse of :meth:`groups`, with zeros in place of those that are None."""
        like = next(group for group in groups if group is not None)
        return torch.cat(
            [
                like.new_zeros(like.shape[0], width) if group is None else group
                for group, width in zip(groups, self.widths, strict=True)
            ],
            -1,
        )

    def of_block(self, log_p_nV: Tensor, log_normalizer_nK: Tensor, target_n: Tensor | None) -> tuple[Tensor, Tensor]:
        """Statistics as columns, (n, C), and the likeliest classes, (n, I)."""
        log_q_nV = self._tempered(log_p_nV)
        columns = []
        if target_n is not None:
            index_n1, kept_n1 = self._index(target_n)
            at_target_n1 = log_q_nV.gather(-1, index_n1)
            columns.append(torch.where(kept_n1, at_target_n1, torch.zeros_like(at_target_n1)))
        if self.spec.entropy:
            columns.append(entropy(log_q_nV).unsqueeze(-1))
        largest_nT, indices_nT = log_q_nV.topk(self.spec.topk, -1)
        if self.spec.argmax:
            indices_nT = torch.cat([log_p_nV.argmax(-1, keepdim=True), indices_nT], -1)
        return torch.cat([*columns, log_normalizer_nK, largest_nT], -1), indices_nT

    def gradient(self, log_p_nV: Tensor, target_n: Tensor | None, by_statistics_nC: Tensor) -> LogProbsGradient:
        """The derivatives by the log-probability of every class, given those by the columns."""
        by_target_n1, by_entropy_n1, by_normalizer_nK, by_largest_nT = self.groups(by_statistics_nC)
        log_q_nV = self._tempered(log_p_nV)
        by_log_q_nV = torch.zeros_like(log_q_nV)
        unused_n1 = (torch.cat([by_entropy_n1, by_normalizer_nK, by_largest_nT], -1) == 0).all(-1, keepdim=True)
        if self.spec.entropy:
            q_nV = log_q_nV.exp()
            # Probabilities with a floor do not sum to 1, and a multiple of them leads somewhere.
            constant = 1.0 if self.spec.floor and self.spec.temperature == 1.0 else 0.0
            inner_nV = (log_q_nV + constant).masked_fill_(q_nV == 0, 0.0)
            by_log_q_nV -= by_entropy_n1 * q_nV * inner_nV
        if self.spec.topk:
            by_log_q_nV.scatter_add_(-1, log_q_nV.topk(self.spec.topk, -1).indices, by_largest_nT)
        if target_n is not None:
            index_n1, kept_n1 = self._index(target_n)
            by_target_n1 = torch.where(kept_n1, by_target_n1, torch.zeros_like(by_target_n1))
            by_log_q_nV.scatter_add_(-1, index_n1, by_target_n1)
            unused_n1 &= by_target_n1 == 0
        if self.spec.temperature != 1.0:
            by_log_q_nV = by_log_q_nV - log_q_nV.exp() * by_log_q_nV.sum(-1, keepdim=True)
            by_log_q_nV /= self.spec.temperature
        return LogProbsGradient(by_log_q_nV, by_normalizer_nK, unused_n1)

    def _tempered(self, log_p_nV: Tensor) -> Tensor:
        temperature = self.spec.temperature
        return log_p_nV if temperature == 1.0 else torch.log_softmax(log_p_nV / temperature, -1)

    def _index(self, target_n: Tensor) -> tuple[Tensor, Tensor]:
        """Class indices that may be looked up, and the tokens that are not ignored."""
        kept_n1 = (target_n != self.spec.ignore_index).unsqueeze(-1)
        index_n1 = target_n.unsqueeze(-1)
        return torch.where(kept_n1, index_n1, torch.zeros_like(index_n1)), kept_n1
