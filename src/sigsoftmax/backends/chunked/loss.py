"""The path that serves every loss: a loop over chunks of logits, with the row routines of a backend.

Shapes: N tokens, K components, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.loop import LossLoop, Rows, TokenLosses
from sigsoftmax.backends.chunked.path import ChunkedPath, gradients_of_tensors, shaped
from sigsoftmax.backends.chunked.providers import LinearLogits, Source
from sigsoftmax.backends.chunked.sharded_loop import ShardedLossLoop
from sigsoftmax.contract import value_checks
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LossResults, Problem
from sigsoftmax.contract.rows import RowRoutines
from sigsoftmax.contract.spec import LossSpec
from sigsoftmax.contract.tokens import TokenBatch, scaled, token_scales, token_weight_gradient
from sigsoftmax.family.formulas import Form

MakeRoutines = Callable[[Form, Sequence[Tensor], Tensor, bool], RowRoutines]


class Computed(NamedTuple):
    """A loss over all tokens, whose gradients by the logits went to the source."""

    total: Tensor
    tokens: TokenLosses
    by_log_prior_NK: Tensor | None
    by_arguments: Sequence[Tensor]
    """of the form, summed over all rows, whether fixed numbers or tensors; empty where not wanted"""


class ChunkedLoss(ChunkedPath[LossSpec]):
    """A loss computed by a loop over chunks. Backends with ways of their own override :meth:`run`."""

    def __init__(self, problem: Problem[LossSpec], make_routines: MakeRoutines, rows_description: str) -> None:
        super().__init__(problem, rows_description)
        self.make_routines = make_routines

    def compute(self, operands: Operands, by_losses: Tensor | None = None) -> LossResults:
        problem, spec, wanted = self.problem, self.problem.spec, self.problem.wanted
        is_none = spec.reduction == "none"
        wants_rows = wanted.any_of_rows and (not is_none or by_losses is not None)
        target, class_weight = problem.target(operands), operands.class_weight
        weights_N = None if operands.token_weights is None else operands.token_weights.reshape(-1)
        scale_N = is_empty = None
        if by_losses is not None:
            scale_N = by_losses.reshape(-1).to(problem.compute_dtype)
            if weights_N is not None:
                scale_N = scaled(scale_N, weights_N.to(scale_N.dtype))
        elif weights_N is not None:
            scale_N, is_empty = token_scales(spec, target, weights_N, class_weight, problem.compute_dtype)
        prior = log_prior_NK = None
        if spec.prior is not None:
            prior = self.prior(operands)
            log_prior_NK = prior.log_prior()
        batch = TokenBatch(target=target, log_prior_NK=log_prior_NK, class_weight_V=class_weight, scale_N=scale_N)
        source, hidden_gradient = self.source(operands, wants_rows)
        computed = self.run(source, self.rows(operands, wants_rows), batch, operands, wants_rows)
        total, losses_N = computed.total, computed.tokens.losses_N
        if is_empty is not None:
            total = torch.where(is_empty, torch.full_like(total, torch.nan), total)

        by_prior = by_weights = None
        by_product: Sequence[Tensor | None] = (hidden_gradient, None, None)
        if isinstance(source, LinearLogits):
            by_product = source.gradients()
        if prior is not None and wants_rows and (wanted.prior_logits or any(wanted.prior_arguments)):
            assert log_prior_NK is not None and computed.by_log_prior_NK is not None
            by_prior = prior.gradient(log_prior_NK, computed.by_log_prior_NK.to(log_prior_NK.dtype))
        if wanted.token_weights and weights_N is not None and (not is_none or by_losses is not None):
            by_weights = token_weight_gradient(spec, target, weights_N, class_weight, losses_N, total)
            if by_losses is not None:
                by_weights = scaled(by_weights, by_losses.reshape(-1).to(by_weights.dtype))
        if is_none:
            each_N = losses_N if weights_N is None else scaled(losses_N, weights_N.to(losses_N.dtype))
            loss = each_N.view(problem.leading)
        else:
            loss = total
        by_prior_arguments = prior.argument_gradients() if prior is not None and wants_rows else ()
        gradients = (
            *by_product,
            by_prior,
            by_weights,
            *gradients_of_tensors(spec.member, computed.by_arguments if wants_rows else ()),
            *gradients_of_tensors(spec.prior, by_prior_arguments),
        )
        return LossResults(
            loss.to(problem.dtype),
            losses_N,
            computed.tokens.log_normalizer_NK,
            computed.tokens.argmax_N,
            computed.tokens.entropy_N,
            shaped(gradients, operands, wanted.flat),
        )

    def rows(self, operands: Operands, wants_rows: bool) -> Rows:
        member = self.problem.spec.member
        needs_arguments = wants_rows and any(self.problem.wanted.arguments)
        return Rows(self.make_routines, member.form, member.arguments(operands.arguments), needs_arguments)

    def run(self, source: Source, rows: Rows, batch: TokenBatch, operands: Operands, wants_gradient: bool) -> Computed:
        """The loss by the chunk loop."""
        spec, shard = self.problem.spec, operands.shard
        if batch.class_weight_V is not None:
            value_checks.check_class_weight(batch.class_weight_V)
        num_classes = source.num_classes if shard is None else shard.num_classes
        value_checks.check_target(batch.target, num_classes, spec.ignore_index)
        scale_N, is_empty = batch.scale_N, None
        if scale_N is None:
            scale_N, is_empty = token_scales(spec, batch.target, None, batch.class_weight_V, self.problem.compute_dtype)
        wanted_scale = scale_N if wants_gradient else None
        if shard is None:
            loop = LossLoop(source, rows, spec, batch, wanted_scale)
        else:
            loop = ShardedLossLoop(shard, source, rows, spec, batch, wanted_scale)
        result = loop.run()
        total = scaled(result.losses_N, scale_N).sum()
        if is_empty is not None:
            total = torch.where(is_empty, torch.full_like(total, torch.nan), total)
        return Computed(total, result, loop.prior_gradient_NK, loop.argument_gradients())

    def scale(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        if factor.device.type == "cpu" and bool(factor == 1):
            return
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
