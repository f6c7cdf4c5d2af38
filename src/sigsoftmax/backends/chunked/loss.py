"""The path that serves every loss: a loop over chunks of logits, with the row routines of a backend.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.chunked.logits import LogitsProvider
from sigsoftmax.backends.chunked.loop import LossLoop, TokenLosses
from sigsoftmax.backends.chunked.path import ChunkedPath
from sigsoftmax.backends.chunked.sharded_statistics import ShardedRows, WholeRows
from sigsoftmax.contract import value_checks
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LossResults, Problem
from sigsoftmax.contract.rows import RowRoutines
from sigsoftmax.contract.spec import LossSpec
from sigsoftmax.contract.tokens import (
    TokenArithmetic,
    TokenBatch,
    mixes_every_class,
    scaled,
    token_scales,
    token_weight_gradient,
)
from sigsoftmax.family.formulas import Form

MakeRoutines = Callable[[Form, Sequence[Tensor], Tensor, bool], RowRoutines]
"""row routines of a form, given its arguments, logits of the same kind, and whether its arguments need gradients"""


class Computed(NamedTuple):
    """A loss over all tokens, whose gradients by the logits went to the provider."""

    total: Tensor
    total_in_units: Tensor
    tokens: TokenLosses
    """whose losses are in units"""
    unit: Tensor | float
    by_log_prior_NK: Tensor | None
    by_arguments: Sequence[Tensor]
    """gradients of the form's arguments, numbers or tensors, summed over all rows; empty where not wanted"""


class ChunkedLoss(ChunkedPath[LossSpec]):
    """A loss computed by a loop over chunks. Backends with ways of their own override :meth:`run`."""

    def __init__(self, problem: Problem[LossSpec], make_routines: MakeRoutines, rows_description: str) -> None:
        super().__init__(problem, rows_description)
        self.make_routines = make_routines

    def compute(self, operands: Operands, by_losses: Tensor | None = None) -> LossResults:
        problem, spec, wanted = self.problem, self.problem.spec, self.problem.wanted
        target, class_weight = problem.target(operands), operands.class_weight
        weights_N = None if operands.token_weights is None else operands.token_weights.reshape(-1)
        # Losses that are not reduced have gradients in a second call, given those of the losses.
        has_gradients = spec.reduction != "none" or by_losses is not None
        wants_rows = wanted.any_of_rows and has_gradients
        scale_N = is_empty = by_weights = None
        if by_losses is not None:
            by_losses = by_losses.reshape(-1).to(problem.compute_dtype)
            scale_N = by_losses if weights_N is None else scaled(by_losses, weights_N.to(by_losses.dtype))
        elif weights_N is not None:
            scale_N, is_empty = token_scales(spec, target, weights_N, class_weight, problem.compute_dtype)
        prior = self.prior(operands)
        log_prior = None if prior is None else prior.log_prior
        batch = TokenBatch(target=target, log_prior=log_prior, class_weight_V=class_weight, scale_N=scale_N)
        provider = self.provider(operands, wants_rows)
        computed = self.run(provider, batch, operands, wants_rows)
        loss, losses_N, unit = _nan_where(is_empty, computed.total), computed.tokens.losses_N, computed.unit
        if wanted.token_weights and weights_N is not None and has_gradients:
            by_weights = token_weight_gradient(
                spec, target, weights_N, class_weight, losses_N, computed.total_in_units, unit
            )
            if by_losses is not None:
                by_weights = scaled(by_weights, by_losses.to(by_weights.dtype))
            by_weights = by_weights * unit
        if spec.reduction == "none":
            loss = losses_N if weights_N is None else scaled(losses_N, weights_N.to(losses_N.dtype))
            loss = (loss * unit).view(problem.leading)
        by_arguments = computed.by_arguments if wants_rows else ()
        return LossResults(
            loss.to(problem.dtype),
            *computed.tokens,
            self.operand_gradients(operands, provider, by_arguments, prior, computed.by_log_prior_NK, by_weights),
        )

    def run(self, provider: LogitsProvider, batch: TokenBatch, operands: Operands, wants_gradient: bool) -> Computed:
        """The loss by the chunk loop."""
        spec, shard, like = self.problem.spec, operands.shard, provider.logits_like
        if batch.class_weight_V is not None:
            value_checks.check_class_weight(batch.class_weight_V)
        num_classes = provider.num_classes if shard is None else shard.num_classes
        value_checks.check_target(batch.target, num_classes, spec.ignore_index)
        scale_N, is_empty, dtype = batch.scale_N, None, self.problem.compute_dtype
        if scale_N is None:
            scale_N, is_empty = token_scales(spec, batch.target, None, batch.class_weight_V, dtype)
        numbers = torch.empty(0, dtype=dtype, device=like.device)
        make: MakeRoutines = FormRows if mixes_every_class(spec, batch) else self.make_routines
        form, arguments = spec.member.form, spec.member.arguments(operands.arguments)
        routines = make(form, arguments, like, self.needs_arguments(wants_gradient))
        scales = scale_N if wants_gradient else None
        tokens = TokenArithmetic(spec, batch, scales, num_classes, numbers, routines.unit)
        if shard is None:
            rows = WholeRows(tokens)
        else:
            rows = ShardedRows(shard, tokens, form, arguments, provider.components)
        loop = LossLoop(provider, routines, tokens, rows)
        result = loop.run()
        total = _nan_where(is_empty, scaled(result.losses_N, scale_N).sum())
        return Computed(
            total * tokens.unit, total, result, tokens.unit, loop.prior_gradient_NK, routines.argument_gradients()
        )

    def needs_arguments(self, wants_gradient: bool) -> bool:
        """True if gradients of the form's arguments are wanted."""
        return wants_gradient and any(self.problem.wanted.arguments)

    def scale(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        if factor.device.type == "cpu" and bool(factor == 1):
            return
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))


def _nan_where(is_empty: Tensor | None, total: Tensor) -> Tensor:
    """NaN for the mean of no tokens."""
    return total if is_empty is None else torch.where(is_empty, torch.full_like(total, torch.nan), total)
