"""The log-probability of every class as one op: of given logits, or of a mixture without its N x K x V.

Arguments as in ``token_loss``. Shapes: N tokens, K components, V classes, d features (d = V where logits are given).
"""

# No postponed annotations here: torch.library reads the schemas from them.
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from sigsoftmax.backends import reference
from sigsoftmax.backends.blocked.any_form import FormRows
from sigsoftmax.backends.gradients import empty_like_dtype, not_differentiable_again, split_arguments
from sigsoftmax.backends.mixture_block import MixtureBlock
from sigsoftmax.backends.sources import GivenLogits, LinearLogits, Source
from sigsoftmax.family import form_by_name


@torch.library.custom_op("sigsoftmax::log_probs", mutates_args=())
def log_probs(
    hidden: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    log_prior: Optional[Tensor],
    arguments: Sequence[Tensor],
    form: str,
    floor: float,
    chunk_bytes: int,
    product_dtype: torch.dtype,
    needs: Sequence[bool],
) -> Tensor:
    """The log-probability of every class, (N, V), in the dtype of the logits."""
    source = _dense_source(hidden, weight, bias, product_dtype, product_dtype, chunk_bytes, needs=(False,) * 5)
    routines = FormRows(form_by_name(form), arguments, source.logits_like)
    out_NV = source.logits_like.new_empty(source.num_tokens, source.num_classes)
    for span, _, logits_RV in source.blocks(routines.max_rows, backpropagate=False):
        if log_prior is None:
            out_NV[span] = routines.rows(logits_RV).log_probs
        else:
            out_NV[span] = MixtureBlock(routines, logits_RV, log_prior[span].to(routines.dtype), floor).log_p_nV
    return out_NV


@log_probs.register_fake
def _(
    hidden: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    log_prior: Optional[Tensor],
    arguments: Sequence[Tensor],
    form: str,
    floor: float,
    chunk_bytes: int,
    product_dtype: torch.dtype,
    needs: Sequence[bool],
) -> Tensor:
    if weight is None:
        return hidden.new_empty(hidden.shape[0], hidden.shape[-1])
    return hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=product_dtype)


@torch.library.custom_op("sigsoftmax::log_probs_backward", mutates_args=())
def log_probs_backward(
    by_log_p: Tensor,
    hidden: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    log_prior: Optional[Tensor],
    arguments: Sequence[Tensor],
    form: str,
    floor: float,
    chunk_bytes: int,
    product_dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight, bias, prior and arguments."""
    needs_arguments = needs[4]
    gradient_dtype = reference.gradient_dtype(form_by_name(form), arguments, product_dtype)
    source = _dense_source(hidden, weight, bias, product_dtype, gradient_dtype, chunk_bytes, needs=needs)
    routines = FormRows(form_by_name(form), arguments, source.logits_like, needs_arguments)
    prior_gradient = by_log_p.new_empty(0) if log_prior is None else log_prior.new_empty(log_prior.shape)
    for span, first_row, logits_RV in source.blocks(routines.max_rows, backpropagate=True):
        by_log_p_nV = by_log_p[span].to(routines.dtype)
        out_RV = source.gradient_rows(first_row, logits_RV)
        if log_prior is None:
            f_RV = routines.rows(logits_RV).log_probs.exp_()
            by_phi_RV = by_log_p_nV - f_RV * by_log_p_nV.sum(-1, keepdim=True)
            routines.backpropagate(logits_RV, by_phi_RV, out_RV)
        else:
            block = MixtureBlock(routines, logits_RV, log_prior[span].to(routines.dtype), floor)
            prior_gradient[span] = block.gradient(by_log_p_nV, None, None, out_RV)
    argument_gradient = (
        torch.cat([g.flatten() for g in routines.argument_gradients()])
        if needs_arguments
        else empty_like_dtype(by_log_p)
    )
    if isinstance(source, LinearLogits):
        by_hidden, by_weight, by_bias = (
            empty_like_dtype(by_log_p) if gradient is None else gradient for gradient in source.gradients()
        )
    else:
        assert isinstance(source, GivenLogits) and source.gradient_NV is not None
        by_hidden, by_weight, by_bias = (
            source.gradient_NV.view_as(hidden),
            empty_like_dtype(by_log_p),
            empty_like_dtype(by_log_p),
        )
    return by_hidden, by_weight, by_bias, prior_gradient, argument_gradient


@log_probs_backward.register_fake
def _(
    by_log_p: Tensor,
    hidden: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    log_prior: Optional[Tensor],
    arguments: Sequence[Tensor],
    form: str,
    floor: float,
    chunk_bytes: int,
    product_dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:

    def gradient(of: Optional[Tensor], needed: bool) -> Tensor:
        if of is None or not needed:
            return empty_like_dtype(by_log_p)
        return torch.empty_like(of, memory_format=torch.contiguous_format)

    dtype = reference.compute_dtype(hidden.dtype if weight is None else product_dtype)
    return (
        gradient(hidden, weight is None or needs[0]),
        gradient(weight, needs[1]),
        gradient(bias, needs[2]),
        gradient(log_prior, log_prior is not None),
        by_log_p.new_empty(sum(a.numel() for a in arguments), dtype=dtype) if needs[4] else empty_like_dtype(by_log_p),
    )


def _log_probs_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, bias, log_prior, arguments, *options = inputs
    ctx.options = options
    ctx.save_for_backward(hidden, weight, bias, log_prior, *arguments)


def _log_probs_backward(ctx: Any, by_log_p: Tensor) -> tuple[Any, ...]:
    hidden, weight, bias, log_prior, *arguments = ctx.saved_tensors
    gradients = log_probs_backward(by_log_p, hidden, weight, bias, log_prior, arguments, *ctx.options)
    needs = ctx.options[-1]
    *dense, by_argument = (gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))
    by_hidden, by_weight, by_bias, by_prior, *by_arguments = not_differentiable_again(
        (*dense, *split_arguments(by_argument, arguments)), (by_log_p, *ctx.saved_tensors)
    )
    return (by_hidden, by_weight, by_bias, by_prior, by_arguments, *(None,) * len(ctx.options))


log_probs.register_autograd(_log_probs_backward, setup_context=_log_probs_context)


def _dense_source(
    hidden: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    product_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    chunk_bytes: int,
    needs: Sequence[bool],
) -> Source:
    if weight is None:
        logits_NV = hidden.squeeze(1)
        return GivenLogits(logits_NV, logits_NV.new_empty(logits_NV.shape) if any(needs) else None)
    return LinearLogits(
        hidden,
        weight,
        bias,
        product_dtype,
        chunk_bytes,
        needs_hidden=needs[0],
        needs_weight=needs[1],
        needs_bias=needs[2],
        gradient_dtype=gradient_dtype,
    )
