"""The readable truth: every operation in plain torch, on any device, with all of autograd.

It holds the N x V logits (N x K x V for a mixture) and whatever autograd keeps of them. The other backends are
tested against it, and it is tested against mathematics.

Shapes: N tokens, K components of a mixture, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.contract.normalizing import Rows, gradient_dtype, log_probs, logsumexp_of_masks, rows
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LogProbsResults, Problem
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec, StatisticsSpec
from sigsoftmax.contract.statistics import StatisticsArithmetic
from sigsoftmax.contract.tokens import floored, scaled, token_scales, z_losses


class TokenResults(NamedTuple):
    """Per token: its loss, and what extras are made of."""

    losses_N: Tensor
    log_normalizer_NK: Tensor
    log_probs_NV: Tensor


def token_losses(
    spec: LossSpec,
    logits_NKV: Tensor,
    log_prior_NK: Tensor | None,
    arguments: Sequence[Tensor],
    target: Tensor,
    class_weight_V: Tensor | None = None,
) -> TokenResults:
    """The loss of each token, before token weights and reduction; 0 for an ignored one.

    ``target`` is (N,) of class indices or (N, V) of probabilities. A plain output layer is a mixture of one:
    K = 1 and no prior. The meaning of every option is torch's; ``z_loss`` adds ``z_loss * n^2`` with n the log
    normaliser (for a mixture the prior's mean of n^2, the prior held constant).
    """
    label_smoothing = spec.label_smoothing
    if not target.is_floating_point():
        logits_NKV = _without_broken(logits_NKV, target == spec.ignore_index)
    parts = rows(logits_NKV, spec.member.form, arguments)
    log_p = _mixed(parts, log_prior_NK, spec.floor)
    num_classes = log_p.shape[-1]
    weight = torch.ones_like(log_p[:0].sum(0)) if class_weight_V is None else class_weight_V.to(log_p)

    def weighted(weights: Tensor) -> Tensor:
        """Minus the sum of weighted log-probabilities."""
        if log_prior_NK is None:
            return (weights.sum(-1, keepdim=True) * parts.normalizer.squeeze(1)).squeeze(-1) - parts.weighted(
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
        prior = torch.ones_like(n_NK) if log_prior_NK is None else log_prior_NK.detach().exp()
        losses = losses + z_losses(n_NK, prior, spec.z_loss)
    losses = torch.where(kept, losses, torch.zeros_like(losses))
    return TokenResults(losses, parts.log_normalizer.detach(), log_p.detach())


# The operations as a whole


class LossValues(NamedTuple):
    """A loss and all that it can tell besides."""

    loss: Tensor
    tokens: TokenResults


def loss(problem: Problem[LossSpec], operands: Operands) -> LossValues:
    """The loss of a call, differentiable by all that plain torch differentiates by."""
    spec = problem.spec
    target = problem.target(operands)
    logits_NKV, arguments, log_prior_NK = _logits_and_prior(problem, operands)
    tokens = token_losses(spec, logits_NKV, log_prior_NK, arguments, target, operands.class_weight)
    weights_N = None if operands.token_weights is None else operands.token_weights.reshape(-1)
    scale_N, is_empty = token_scales(spec, target, weights_N, operands.class_weight, tokens.losses_N.dtype)
    losses_N = scaled(tokens.losses_N, scale_N)
    if spec.reduction == "none":
        total = losses_N.view(problem.leading)
    else:
        total = losses_N.sum()
        if is_empty is not None:
            total = torch.where(is_empty, torch.full_like(total, torch.nan), total)
    return LossValues(total.to(problem.dtype), tokens)


def log_probs_of(problem: Problem[LogProbsSpec], operands: Operands) -> LogProbsResults:
    """Log-probabilities of every class, and the log normalisers of the components."""
    logits_NKV, arguments, log_prior_NK = _logits_and_prior(problem, operands)
    parts = rows(logits_NKV, problem.spec.member.form, arguments)
    log_p_NV = _mixed(parts, log_prior_NK, problem.spec.floor)
    return LogProbsResults(log_p_NV.to(problem.dtype), parts.log_normalizer.detach())


def statistics_of(problem: Problem[StatisticsSpec], operands: Operands) -> tuple[Tensor, Tensor]:
    """All statistics of tokens in the columns of one matrix, (N, C), and the likeliest classes in those of another."""
    spec, target_N = problem.spec, None
    logits_NKV, arguments, log_prior_NK = _logits_and_prior(problem, operands)
    if operands.target is not None:
        target_N = problem.target(operands)
        logits_NKV = _without_broken(logits_NKV, target_N == spec.ignore_index)
    parts = rows(logits_NKV, spec.member.form, arguments)
    arithmetic = StatisticsArithmetic(spec, problem.components, has_target=target_N is not None)
    return arithmetic.of_block(_mixed(parts, log_prior_NK, spec.floor), parts.log_normalizer, target_N)


def _without_broken(logits_NKV: Tensor, ignored_N: Tensor) -> Tensor:
    """Logits, 0 in ignored rows that have no distribution: autograd would pass 0 * NaN on from them."""
    broken = ~logits_NKV.detach().amax(-1, keepdim=True).isfinite() & ignored_N[:, None, None]
    return torch.where(broken, torch.zeros_like(logits_NKV), logits_NKV)


def _mixed(parts: Rows, log_prior_NK: Tensor | None, floor: float) -> Tensor:
    """The log-probability of every class, (N, V)."""
    if log_prior_NK is None:
        return parts.log_probs.squeeze(1)
    return floored(logsumexp_of_masks(log_prior_NK.unsqueeze(-1) + parts.log_probs), floor)


def _logits_and_prior(
    problem: Problem[LossSpec] | Problem[LogProbsSpec] | Problem[StatisticsSpec], operands: Operands
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """(N, K, V) logits, the arguments of the form, and the log-prior (N, K)."""
    member, prior = problem.spec.member, problem.spec.prior
    arguments = member.arguments(operands.arguments)
    hidden_NKd = problem.hidden(operands)
    log_prior_NK = None
    if prior is not None:
        prior_arguments = prior.arguments(operands.prior_arguments)
        log_prior_NK = log_probs(problem.prior_logits(operands), prior.form, prior_arguments)
    if operands.weight is None:
        return hidden_NKd, arguments, log_prior_NK
    dtype = problem.product_dtype
    wide = gradient_dtype(member, arguments, dtype)
    return linear(hidden_NKd, operands.weight, operands.bias, dtype, wide), arguments, log_prior_NK


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
