"""The loss of each token as one op, with the gradients of their weighted total computed in the same pass.

Rows of logits are given (``weight`` is None) or the product of hidden vectors and an output matrix; a prior makes them
a mixture. The output function travels as the name of its form and the tensors of its arguments. torch.compile sees an
op of torch.library, which it keeps whole; outside of it an autograd function does the same with less overhead.

Shapes: N tokens, K components, V classes, d features (d = V where logits are given).
"""

# No postponed annotations here: torch.library reads the schema from them.
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from sigsoftmax.backends import hugepages, reference
from sigsoftmax.backends.chunks import LossOptions
from sigsoftmax.backends.gradients import (
    empty_like_dtype,
    is_traced,
    not_differentiable_again,
    split_arguments,
    times,
)
from sigsoftmax.backends.run_loss import run_loss
from sigsoftmax.backends.shards import Shard
from sigsoftmax.backends.sources import GivenLogits, LinearLogits, Source
from sigsoftmax.family import form_by_name


def _compute(
    hidden: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    log_prior: Optional[Tensor],
    arguments: Sequence[Tensor],
    target: Tensor,
    class_weight: Optional[Tensor],
    scale: Optional[Tensor],
    is_mean: bool,
    form: str,
    backend: str,
    label_smoothing: float,
    z_loss: float,
    floor: float,
    ignore_index: int,
    chunk_bytes: int,
    weight_gradient: str,
    product_dtype: torch.dtype,
    argmax: bool,
    entropy: bool,
    has_gradients: bool,
    needs: Sequence[bool],
    shard: Optional[Shard] = None,
) -> tuple[Optional[Tensor], ...]:
    """Total and losses; log normaliser, argmax, entropy; gradients of hidden, weight, bias, prior, arguments.

    ``scale`` is what each token counts in the total; without it kept tokens count alike, ``is_mean`` making it a mean.
    ``needs`` says which of the five gradients are wanted; without ``has_gradients`` none is computed. ``shard``
    (``shards.Shard``, no part of the op) tells of classes that other processes hold.
    """
    needs_hidden, needs_weight, needs_bias, needs_prior, needs_arguments = (has_gradients and need for need in needs)
    source: Source
    hidden_gradient = None
    if weight is None:
        logits_NV = hidden.squeeze(1)
        if has_gradients:
            hidden_gradient = hugepages.advise(torch.empty_like(hidden, memory_format=torch.contiguous_format))
        source = GivenLogits(logits_NV, None if hidden_gradient is None else hidden_gradient.squeeze(1))
    else:
        source = LinearLogits(
            hidden,
            weight,
            bias,
            product_dtype,
            chunk_bytes,
            needs_hidden=needs_hidden,
            needs_weight=needs_weight,
            needs_bias=needs_bias,
            weight_gradient=weight_gradient,
            budget_classes=None if shard is None else shard.largest,
            gradient_dtype=reference.gradient_dtype(form_by_name(form), arguments, product_dtype),
        )
    options = LossOptions(
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        floor=floor,
        ignore_index=ignore_index,
        argmax=argmax,
        entropy=entropy,
    )
    total, result, by_prior_NK, argument_gradients = run_loss(
        source,
        form_by_name(form),
        arguments,
        target,
        options,
        backend,
        log_prior_NK=log_prior,
        class_weight_V=class_weight,
        scale_N=scale,
        is_mean=is_mean,
        wants_gradient=has_gradients,
        needs_arguments=needs_arguments,
        shard=shard,
    )
    by_weight = by_bias = by_prior = by_argument = None
    if isinstance(source, LinearLogits):
        hidden_gradient, by_weight, by_bias = source.gradients()
    if needs_prior and by_prior_NK is not None and log_prior is not None:
        by_prior = by_prior_NK.to(log_prior.dtype)
    if needs_arguments:
        by_argument = torch.cat([gradient.flatten() for gradient in argument_gradients])
    return (total, *result, hidden_gradient, by_weight, by_bias, by_prior, by_argument)


def _compute_token_loss(hidden: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """As an op, whose results are tensors: what is absent has no elements."""
    total, losses, log_normalizer, argmax, entropy, by_hidden, *gradients = _compute(hidden, *inputs)
    assert total is not None and losses is not None and log_normalizer is not None

    def present(result: Optional[Tensor], dtype: torch.dtype = losses.dtype) -> Tensor:
        # Outputs of an op must not share memory, be they empty.
        return losses.new_empty(0, dtype=dtype) if result is None else result

    return (
        total,
        losses,
        log_normalizer,
        present(argmax, torch.int64),
        present(entropy),
        present(by_hidden, hidden.dtype),
        *map(present, gradients),
    )


def _fake_token_loss(
    hidden: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    log_prior: Optional[Tensor],
    arguments: Sequence[Tensor],
    target: Tensor,
    class_weight: Optional[Tensor],
    scale: Optional[Tensor],
    is_mean: bool,
    form: str,
    backend: str,
    label_smoothing: float,
    z_loss: float,
    floor: float,
    ignore_index: int,
    chunk_bytes: int,
    weight_gradient: str,
    product_dtype: torch.dtype,
    argmax: bool,
    entropy: bool,
    has_gradients: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, components, _ = hidden.shape
    needs_hidden, needs_weight, needs_bias, needs_prior, needs_arguments = (has_gradients and need for need in needs)
    dtype = reference.compute_dtype(hidden.dtype if weight is None else product_dtype)
    numbers = hidden.new_empty(0, dtype=dtype)

    def gradient(of: Optional[Tensor], needed: bool, absent: Tensor = numbers) -> Tensor:
        if of is None or not needed:
            return empty_like_dtype(absent)
        return torch.empty_like(of, memory_format=torch.contiguous_format)

    return (
        numbers.new_empty(()),
        numbers.new_empty(tokens),
        numbers.new_empty(tokens, components),
        hidden.new_empty(tokens if argmax else 0, dtype=torch.int64),
        numbers.new_empty(tokens if entropy else 0),
        gradient(hidden, has_gradients if weight is None else needs_hidden, absent=hidden),
        gradient(weight, needs_weight),
        gradient(bias, needs_bias),
        gradient(log_prior, needs_prior),
        numbers.new_empty(sum(a.numel() for a in arguments) if needs_arguments else 0),
    )


_token_loss_op = torch.library.custom_op(
    "sigsoftmax::token_loss",
    _compute_token_loss,
    mutates_args=(),
    schema=torch.library.infer_schema(_fake_token_loss, mutates_args=()),
)
_token_loss_op.register_fake(_fake_token_loss)


def _token_loss_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, log_prior, arguments, target, class_weight, scale, *options = inputs
    _, losses, _, _, _, *gradients = output
    ctx.shard = None
    _save_for_backward(
        ctx, (hidden, weight, bias, log_prior, target, class_weight), scale, arguments, options, losses, gradients
    )


def _save_for_backward(
    ctx: Any,
    inputs: Sequence[Optional[Tensor]],
    scale: Optional[Tensor],
    arguments: Sequence[Tensor],
    options: Sequence[Any],
    losses: Optional[Tensor],
    gradients: Sequence[Optional[Tensor]],
) -> None:
    """The gradients if they were computed with the loss, else what they can be computed from."""
    ctx.set_materialize_grads(False)
    ctx.num_arguments = len(arguments)
    ctx.options = options
    ctx.has_gradients, ctx.needs = options[-2], options[-1]
    ctx.needs_scale = scale is not None and scale.requires_grad
    if ctx.has_gradients:
        ctx.save_for_backward(losses, *gradients, *arguments, *([scale] if ctx.needs_scale else []))
    else:
        ctx.save_for_backward(*inputs, *arguments)


def _token_loss_backward(ctx: Any, by_total: Optional[Tensor], by_losses: Optional[Tensor], *_: Any) -> tuple[Any, ...]:
    by_hidden, by_weight, by_bias, by_prior, *by_arguments, by_scale = _token_loss_gradients(ctx, by_total, by_losses)
    return (by_hidden, by_weight, by_bias, by_prior, by_arguments, None, None, by_scale, *(None,) * len(ctx.options))


def _token_loss_gradients(
    ctx: Any, by_total: Optional[Tensor], by_losses: Optional[Tensor]
) -> tuple[Optional[Tensor], ...]:
    """Gradients of hidden, weight, bias, prior, each argument and scale."""
    by_scale = None
    if (by_total if ctx.has_gradients else by_losses) is None:
        return (None,) * (5 + ctx.num_arguments)
    saved = ctx.saved_tensors
    arguments = list(saved[6 : 6 + ctx.num_arguments])
    if ctx.has_gradients:
        assert by_total is not None
        if ctx.needs_scale:
            by_scale = reference.counted(saved[0].detach(), saved[-1].detach()) * by_total
        # Saved outputs come back as results of the op; a gradient that wants a gradient is for create_graph alone.
        stored = [None if t is None else t.detach() if t.requires_grad else t for t in saved[1:6]]
        scaled = iter(times([t for t in stored if t is not None], by_total))
        gradients = [None if t is None else next(scaled) for t in stored]
    else:
        hidden, weight, bias, log_prior, target, class_weight = saved[:6]
        is_mean, *options, _, needs = ctx.options
        assert by_losses is not None
        shard = () if ctx.shard is None else (ctx.shard,)
        compute: Any = _token_loss_op if is_traced(by_losses) and not shard else _compute
        with torch.no_grad():
            results = compute(
                hidden,
                weight,
                bias,
                log_prior,
                arguments,
                target,
                class_weight,
                by_losses,
                is_mean,
                *options,
                True,
                needs,
                *shard,
            )
        gradients = list(results[5:])
    *dense, by_argument = (gradient if needed else None for gradient, needed in zip(gradients, ctx.needs, strict=True))
    outputs = (*dense, *split_arguments(by_argument, arguments), by_scale)
    return not_differentiable_again(outputs, (by_total, by_losses, *saved))


_token_loss_op.register_autograd(_token_loss_backward, setup_context=_token_loss_context)


class _EagerTokenLoss(torch.autograd.Function):
    """The same op outside torch.compile: calls through torch.library cost more than a small loss."""

    @staticmethod
    def forward(
        ctx: Any,
        options: Sequence[Any],
        shard: Optional[Shard],
        hidden: Tensor,
        weight: Optional[Tensor],
        bias: Optional[Tensor],
        log_prior: Optional[Tensor],
        target: Tensor,
        class_weight: Optional[Tensor],
        scale: Optional[Tensor],
        *arguments: Tensor,
    ) -> tuple[Optional[Tensor], ...]:
        total, losses, log_normalizer, argmax, entropy, *gradients = _compute(
            hidden, weight, bias, log_prior, arguments, target, class_weight, scale, *(*options, shard)
        )
        ctx.shard = shard
        inputs = (hidden, weight, bias, log_prior, target, class_weight)
        _save_for_backward(ctx, inputs, scale, arguments, options, losses, gradients)
        ctx.mark_non_differentiable(*(extra for extra in (log_normalizer, argmax, entropy) if extra is not None))
        return total, losses, log_normalizer, argmax, entropy

    @staticmethod
    def backward(ctx: Any, *by_outputs: Optional[Tensor]) -> tuple[Any, ...]:
        by_total, by_losses, *_ = by_outputs
        dense = _token_loss_gradients(ctx, by_total, by_losses)
        by_hidden, by_weight, by_bias, by_prior, *by_arguments, by_scale = dense
        return (None, None, by_hidden, by_weight, by_bias, by_prior, None, None, by_scale, *by_arguments)


def token_loss(
    hidden: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    log_prior: Optional[Tensor],
    arguments: Sequence[Tensor],
    target: Tensor,
    class_weight: Optional[Tensor],
    scale: Optional[Tensor],
    *options: Any,
    shard: Optional[Shard] = None,
) -> Sequence[Any]:
    """Total, losses, log normaliser, argmax and entropy, differentiable; the options are those of the op.

    Extras that were not asked for are None, or without elements.
    """
    if torch.compiler.is_compiling():
        assert shard is None, "exchanges between processes are not compiled"
        inputs = (hidden, weight, bias, log_prior, arguments, target, class_weight, scale)
        return _token_loss_op(*inputs, *options)[:5]
    return _EagerTokenLoss.apply(
        options, shard, hidden, weight, bias, log_prior, target, class_weight, scale, *arguments
    )
