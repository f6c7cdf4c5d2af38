"""The readable truth: every operation in plain torch, on any device, with all of autograd.

It holds the N x V logits (N x K x V for a mixture) and whatever autograd keeps of them. The other backends are
tested against it, and it is tested against mathematics.

Shapes: N tokens, K components of a mixture, V classes, C columns of numbers, I of classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.contract import normalizing
from sigsoftmax.contract.normalizing import gradient_dtype, mixed
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import AnyProblem, LogProbsResults, Problem
from sigsoftmax.contract.rows import MASK, Logarithms
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec, StatisticsSpec
from sigsoftmax.contract.statistics import StatisticsArithmetic
from sigsoftmax.contract.tokens import finite_times, scaled, token_scales, z_losses


class TokenResults(NamedTuple):
    """Per token: its loss, and what extras are made of."""

    losses: Logarithms
    """(N,), in units in which they do not overflow"""
    log_normalizer_NK: Tensor
    log_probs_NV: Tensor


def token_losses(
    spec: LossSpec,
    logits_NKV: Tensor,
    log_prior: Logarithms | None,
    arguments: Sequence[Tensor],
    target: Tensor,
    class_weight_V: Tensor | None = None,
    scale_N: Tensor | None = None,
) -> TokenResults:
    """The loss of each token, before token weights and reduction; 0 for an ignored one.

    ``target`` is (N,) of class indices or (N, V) of probabilities. A plain output layer is a mixture of one:
    K = 1 and no prior. The meaning of every option is torch's; ``z_loss`` adds ``z_loss * n^2`` with n the log
    normaliser (for a mixture the prior's mean of n^2, the prior held constant). ``scale_N`` is what each loss is to be
    multiplied by: products of it and of derivatives of the z-loss are kept finite.
    """
    label_smoothing = spec.label_smoothing
    parts = normalizing.rows(logits_NKV, spec.member.form, arguments)
    log_p, unit = mixed(parts, log_prior, spec.floor)
    num_classes = log_p.shape[-1]
    weight = torch.ones_like(log_p[:0].sum(0)) if class_weight_V is None else class_weight_V.to(log_p)

    def weighted(weights: Tensor) -> Tensor:
        """Minus the sum of weighted log-probabilities, in units."""
        if log_prior is None:
            normalizer_N1 = parts.normalizer.squeeze(1) / unit
            return (weights.sum(-1, keepdim=True) * normalizer_N1).squeeze(-1) - parts.weighted(
                weights.unsqueeze(-2)
            ).squeeze(1)
        return -scaled(log_p, weights).sum(-1)

    if target.is_floating_point():
        smooth = target.to(log_p) * (1.0 - label_smoothing) + label_smoothing / num_classes
        losses = weighted(smooth * weight)
        kept = torch.ones_like(losses, dtype=torch.bool)
    else:
        kept = target != spec.ignore_index
        index = torch.where(kept, target, torch.zeros_like(target))
        losses = -scaled(log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1), (1.0 - label_smoothing) * weight[index])
        if label_smoothing:
            losses = losses + weighted((label_smoothing / num_classes) * weight)

    if spec.z_loss:
        n_NK = parts.finite_log_normalizer
        prior = torch.ones_like(n_NK) if log_prior is None else log_prior.values.detach().exp()
        steepest = parts.in_units.unit * torch.ones_like(n_NK[:, 0])
        if scale_N is not None:
            steepest = steepest * scale_N.detach().abs().clamp(min=1.0)
        losses = losses + _z_losses(n_NK, prior, spec.z_loss, steepest) / unit
    losses = torch.where(kept, losses, torch.zeros_like(losses))
    log_probs_NV = Logarithms(log_p.detach(), unit).values
    return TokenResults(Logarithms(losses, unit), parts.log_normalizer.detach(), log_probs_NV)


def _z_losses(n_NK: Tensor, prior_NK: Tensor, z_loss: float, steepest_N: Tensor) -> Tensor:
    """The z-loss, as n^2 = m^2 + 2 m (n - m) + (n - m)^2 for m = n without a gradient.

    Autograd would multiply an incoming gradient by n before it multiplies it by the factor of the z-loss. So it finds
    that product made, and derivatives of every order are right. What it is multiplied by next, at most ``steepest_N``,
    makes no float that overflows.
    """
    m_NK = n_NK.detach()
    gap_NK = n_NK - m_NK
    linear_NK = (
        finite_times(2.0 * z_loss * prior_NK * m_NK, steepest_N.unsqueeze(-1)) * gap_NK
        + z_loss * prior_NK * gap_NK * gap_NK
    )
    return z_losses(m_NK, prior_NK, z_loss) + linear_NK.sum(-1)


# The operations as a whole


class LossValues(NamedTuple):
    """A loss and all that it can tell besides."""

    loss: Tensor
    tokens: TokenResults


def loss(problem: Problem[LossSpec], operands: Operands) -> LossValues:
    """The loss of a call, differentiable by all that plain torch differentiates by."""
    spec = problem.spec
    target = problem.target(operands)
    weights_N = None if operands.token_weights is None else operands.token_weights.reshape(-1)
    scale_N, is_empty = token_scales(spec, target, weights_N, operands.class_weight, problem.compute_dtype)
    rows = _token_rows(problem, operands, scale_N == 0)
    tokens = token_losses(spec, rows.logits_NKV, rows.log_prior, rows.arguments, target, operands.class_weight, scale_N)
    tokens = TokenResults(
        tokens.losses._replace(multiples=rows.or_nan(tokens.losses.multiples)),
        rows.or_no_normalizer(tokens.log_normalizer_NK),
        rows.or_nan(tokens.log_probs_NV),
    )
    losses_N, unit = tokens.losses
    losses_N = scaled(losses_N, scale_N, unit)
    if spec.reduction == "none":
        total = unit * losses_N.view(problem.leading)
    else:
        total = unit * losses_N.sum()
        if is_empty is not None:
            total = torch.where(is_empty, torch.full_like(total, torch.nan), total)
    return LossValues(total.to(problem.dtype), tokens)


def log_probs_of(problem: Problem[LogProbsSpec], operands: Operands) -> LogProbsResults:
    """Log-probabilities of every class, and the log normalisers of the components."""
    rows = _token_rows(problem, operands)
    parts = normalizing.rows(rows.logits_NKV, problem.spec.member.form, rows.arguments)
    if rows.log_prior is None:
        log_p_NV = parts.log_probs.squeeze(1)
    else:
        log_p_NV = mixed(parts, rows.log_prior, problem.spec.floor).values
    return LogProbsResults(log_p_NV.to(problem.dtype), parts.log_normalizer.detach())


def statistics_of(problem: Problem[StatisticsSpec], operands: Operands) -> tuple[Tensor, Tensor]:
    """All statistics of tokens as columns of a matrix, (N, C), and likeliest classes as those of another, (N, I)."""
    spec, target_N = problem.spec, None if operands.target is None else problem.target(operands)
    rows = _token_rows(problem, operands, None if target_N is None else target_N == spec.ignore_index)
    parts = normalizing.rows(rows.logits_NKV, spec.member.form, rows.arguments)
    log_p_NV = rows.or_nan(mixed(parts, rows.log_prior, spec.floor).values)
    return StatisticsArithmetic(problem).of_block(log_p_NV, rows.or_no_normalizer(parts.log_normalizer), target_N)


class _TokenRows(NamedTuple):
    """The rows of tokens, with 0 in rows that do not count and have no distribution.

    Autograd would pass 0 * NaN on from them. Extras do not depend on targets, so that those of such a row are NaN.
    """

    logits_NKV: Tensor
    log_prior: Logarithms | None
    arguments: list[Tensor]
    highest_NK: Tensor
    is_broken_NK: Tensor
    is_broken_N: Tensor

    def or_nan(self, values: Tensor) -> Tensor:
        """Values of tokens, (N,) or (N, V), NaN for those with such a row."""
        is_broken = self.is_broken_N if values.ndim == 1 else self.is_broken_N.unsqueeze(-1)
        return torch.where(is_broken, torch.full_like(values, torch.nan), values)

    def or_no_normalizer(self, log_normalizer_NK: Tensor) -> Tensor:
        """Log normalisers, for such a row NaN, or -inf if all its classes are masked."""
        nothing = torch.full_like(log_normalizer_NK, torch.nan).masked_fill(self.highest_NK == MASK, MASK)
        return torch.where(self.is_broken_NK, nothing, log_normalizer_NK)


def _without_broken(logits: Tensor, unused_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with 0 in rows of unused tokens without a distribution; the highest of each row, and which these are."""
    highest = logits.detach().amax(-1)
    if unused_N is None:
        return logits, highest, torch.zeros_like(highest, dtype=torch.bool)
    is_broken = ~highest.isfinite() & (unused_N if highest.ndim == 1 else unused_N.unsqueeze(-1))
    return torch.where(is_broken.unsqueeze(-1), torch.zeros_like(logits), logits), highest, is_broken


def _token_rows(problem: AnyProblem, operands: Operands, unused_N: Tensor | None = None) -> _TokenRows:
    """The logits (N, K, V), the log-prior (N, K), and the arguments of the form."""
    member, prior = problem.spec.member, problem.spec.prior
    arguments = member.arguments(operands.arguments)
    logits_NKV = problem.hidden(operands)
    if operands.weight is not None:
        dtype = problem.product_dtype
        wide = gradient_dtype(problem.spec, arguments, dtype)
        logits_NKV = linear(logits_NKV, operands.weight, operands.bias, dtype, wide)
    logits_NKV, highest_NK, is_broken_NK = _without_broken(logits_NKV, unused_N)
    is_broken_N, log_prior = is_broken_NK.any(1), None
    if prior is not None:
        prior_NK, _, has_no_prior_N = _without_broken(problem.prior_logits(operands), unused_N)
        is_broken_N = is_broken_N | has_no_prior_N
        prior_arguments = prior.arguments(operands.prior_arguments)
        log_prior = normalizing.rows(prior_NK, prior.form, prior_arguments).log_probs_in_units
    return _TokenRows(logits_NKV, log_prior, arguments, highest_NK, is_broken_NK, is_broken_N)


def linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, gradient_dtype: torch.dtype
) -> Tensor:
    """Products of this dtype, in one that their gradient needs."""
    hidden, weight = (t.to(dtype).to(gradient_dtype) for t in (hidden, weight))
    product = F.linear(hidden, weight, None if bias is None else bias.to(dtype).to(gradient_dtype))
    if dtype == gradient_dtype:
        return product
    # Rounded for itself alone: autograd would round the gradient as well.
    exact = product.detach()
    return product + (exact.to(dtype).to(gradient_dtype) - exact)
