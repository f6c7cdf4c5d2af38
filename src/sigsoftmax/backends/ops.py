"""The operations as torch.library ops, so that torch.compile keeps them whole.

Two ops serve every public function. ``token_loss`` is the loss of each token, with the gradients of their weighted
total computed in the same pass; ``log_probs`` is the log-probability of every class. Their rows of logits are given
(``weight`` is None) or the product of hidden vectors and an output matrix; a prior makes them a mixture. The output
function travels as the name of its form and the tensors of its arguments.

Shapes: N tokens, K components, V classes, d features (d = V where logits are given).
"""

# No postponed annotations here: torch.library reads the schemas from them.
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from sigsoftmax import validation
from sigsoftmax.backends import dispatch, hugepages, reference
from sigsoftmax.backends.blocked.any_form import FormRows
from sigsoftmax.backends.chunks import LossLoop, LossOptions, MixtureBlock, TokenLosses, scaled, token_scales
from sigsoftmax.backends.sources import GivenLogits, LinearLogits, Source
from sigsoftmax.family import Form, form_by_name

NO_SECOND_DERIVATIVE = (
    b"sigsoftmax: the fast backends have no second derivative; pass backend='reference' (plain torch, which holds "
    b"the N x V logits) to differentiate twice"
)


def run_loss(
    source: Source,
    form: Form,
    arguments: Sequence[Tensor],
    target: Tensor,
    options: LossOptions,
    backend: str,
    *,
    log_prior_NK: Optional[Tensor],
    class_weight_V: Optional[Tensor],
    scale_N: Optional[Tensor],
    is_mean: bool,
    wants_gradient: bool,
    needs_arguments: bool,
) -> tuple[Tensor, TokenLosses, Optional[Tensor], list[Tensor]]:
    """Total, tokens' losses, gradients of prior and arguments; those of the logits go to the source."""
    if class_weight_V is not None:
        validation.check_class_weight(class_weight_V)
    make_routines = dispatch.row_routines(backend)
    if backend == "triton" and not validation.wants_messages(target.device):
        from sigsoftmax.backends.triton import plain, rows

        if plain.is_plain(source, target, log_prior_NK, options):
            routines = rows.TritonRows(form, arguments, source.logits_like, needs_arguments)
            total, result = plain.plain_loss(
                source,
                routines,
                target,
                class_weight_V,
                scale_N,
                options,
                is_mean=is_mean,
                wants_gradient=wants_gradient,
            )
            return total, result, None, routines.argument_gradients()
    validation.check_target(target, source.num_classes, options.ignore_index)
    dtype = reference.compute_dtype(source.logits_like.dtype)
    is_empty = None
    if scale_N is None:
        scale_N, is_empty = token_scales(target, None, class_weight_V, options.ignore_index, dtype, is_mean=is_mean)
    scale_N = scale_N.to(dtype)
    loop = LossLoop(
        source,
        form,
        arguments,
        target,
        options,
        make_routines,
        log_prior_NK=log_prior_NK,
        class_weight_V=class_weight_V,
        scale_N=scale_N if wants_gradient else None,
        needs_arguments=needs_arguments,
    )
    result = loop.run()
    total = scaled(result.losses_N, scale_N).sum()
    if is_empty is not None:
        total = torch.where(is_empty, torch.full_like(total, torch.nan), total)
    return total, result, loop.prior_gradient_NK, loop.argument_gradients()


def _empty(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype, device=like.device)


def _compute_token_loss(
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
    """Total and losses; log normaliser, argmax, entropy; gradients of hidden, weight, bias, prior, arguments.

    ``scale`` is what each token counts in the total; without it kept tokens count alike, ``is_mean`` making it a mean.
    ``needs`` says which of the five gradients are wanted; without ``has_gradients`` none is computed.
    """
    needs_hidden, needs_weight, needs_bias, needs_prior, needs_arguments = (has_gradients and need for need in needs)
    source: Source
    hidden_gradient = _empty(hidden)
    if weight is None:
        logits_NV = hidden.squeeze(1)
        if has_gradients:
            hidden_gradient = hugepages.advise(torch.empty_like(hidden, memory_format=torch.contiguous_format))
        source = GivenLogits(logits_NV, hidden_gradient.squeeze(1) if has_gradients else None)
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
    )
    # Outputs of an op must not share memory, be they empty.
    by_weight, by_bias, by_prior, by_argument = (_empty(result.losses_N) for _ in range(4))
    if isinstance(source, LinearLogits):
        if source.hidden_gradient is not None:
            hidden_gradient = source.hidden_gradient
        if source.weight_gradient is not None and weight is not None:
            by_weight = source.weight_gradient.to(weight.dtype)
        if source.bias_gradient is not None and bias is not None:
            by_bias = source.bias_gradient.to(bias.dtype)
    if needs_prior and by_prior_NK is not None and log_prior is not None:
        by_prior = by_prior_NK.to(log_prior.dtype)
    if needs_arguments:
        by_argument = torch.cat([gradient.flatten() for gradient in argument_gradients])
    return (total, *result, hidden_gradient, by_weight, by_bias, by_prior, by_argument)


_token_loss_op = torch.library.custom_op("sigsoftmax::token_loss", _compute_token_loss, mutates_args=())


@_token_loss_op.register_fake
def _(
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
) -> tuple[Tensor, ...]:
    tokens, components, _ = hidden.shape
    needs_hidden, needs_weight, needs_bias, needs_prior, needs_arguments = (has_gradients and need for need in needs)
    dtype = reference.compute_dtype(hidden.dtype if weight is None else product_dtype)
    numbers = hidden.new_empty(0, dtype=dtype)

    def gradient(of: Optional[Tensor], needed: bool, absent: Tensor = numbers) -> Tensor:
        if of is None or not needed:
            return _empty(absent)
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


def _token_loss_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, log_prior, arguments, target, class_weight, scale, *options = inputs
    _, losses, _, _, _, *gradients = output
    _save_for_backward(
        ctx, (hidden, weight, bias, log_prior, target, class_weight), scale, arguments, options, losses, gradients
    )


def _save_for_backward(
    ctx: Any,
    inputs: Sequence[Optional[Tensor]],
    scale: Optional[Tensor],
    arguments: Sequence[Tensor],
    options: Sequence[Any],
    losses: Tensor,
    gradients: Sequence[Tensor],
) -> None:
    """The gradients if they were computed with the loss, else what they can be computed from."""
    ctx.set_materialize_grads(False)
    ctx.num_arguments = len(arguments)
    ctx.options = options
    ctx.has_gradients, ctx.needs = options[-2], options[-1]
    ctx.needs_scale = scale is not None and scale.requires_grad
    if ctx.has_gradients:
        ctx.save_for_backward(losses, *gradients, *arguments)
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
    arguments = list(saved[6:])
    if ctx.has_gradients:
        assert by_total is not None
        # Saved outputs come back as results of the op; a gradient that wants a gradient is for create_graph alone.
        losses, *gradients = (tensor.detach() for tensor in saved[:6])
        if ctx.needs_scale:
            by_scale = losses * by_total
        gradients = [_times(gradient, by_total) for gradient in gradients]
    else:
        hidden, weight, bias, log_prior, target, class_weight = saved[:6]
        is_mean, *options, _, needs = ctx.options
        compute: Any = _token_loss_op if torch.compiler.is_compiling() else _compute_token_loss
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
            )
        gradients = list(results[5:])
    *dense, by_argument = (gradient if needed else None for gradient, needed in zip(gradients, ctx.needs, strict=True))
    outputs = (*dense, *_split_arguments(by_argument, arguments), by_scale)
    return _not_differentiable_again(outputs, (by_total, by_losses, *saved))


_token_loss_op.register_autograd(_token_loss_backward, setup_context=_token_loss_context)


class _EagerTokenLoss(torch.autograd.Function):
    """The same op outside torch.compile: calls through torch.library cost more than a small loss."""

    @staticmethod
    def forward(
        ctx: Any,
        options: Sequence[Any],
        hidden: Tensor,
        weight: Optional[Tensor],
        bias: Optional[Tensor],
        log_prior: Optional[Tensor],
        target: Tensor,
        class_weight: Optional[Tensor],
        scale: Optional[Tensor],
        *arguments: Tensor,
    ) -> tuple[Tensor, ...]:
        total, losses, log_normalizer, argmax, entropy, *gradients = _compute_token_loss(
            hidden, weight, bias, log_prior, arguments, target, class_weight, scale, *options
        )
        inputs = (hidden, weight, bias, log_prior, target, class_weight)
        _save_for_backward(ctx, inputs, scale, arguments, options, losses, gradients)
        ctx.mark_non_differentiable(log_normalizer, argmax, entropy)
        return total, losses, log_normalizer, argmax, entropy

    @staticmethod
    def backward(ctx: Any, *by_outputs: Optional[Tensor]) -> tuple[Any, ...]:
        by_total, by_losses, *_ = by_outputs
        dense = _token_loss_gradients(ctx, by_total, by_losses)
        by_hidden, by_weight, by_bias, by_prior, *by_arguments, by_scale = dense
        return (None, by_hidden, by_weight, by_bias, by_prior, None, None, by_scale, *by_arguments)


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
) -> Sequence[Tensor]:
    """Total, losses, log normaliser, argmax and entropy, differentiable; the options are those of the op."""
    if torch.compiler.is_compiling():
        inputs = (hidden, weight, bias, log_prior, arguments, target, class_weight, scale)
        return _token_loss_op(*inputs, *options)[:5]
    return _EagerTokenLoss.apply(options, hidden, weight, bias, log_prior, target, class_weight, scale, *arguments)


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """Gradient times the incoming gradient, in place where nobody will ask for it again."""
    if torch.compiler.is_compiling() or _keeps_graph():
        return gradient * factor.to(gradient.dtype)
    if factor.device.type == "cpu" and bool(factor == 1):
        return gradient
    if factor.device.type == "cuda" and dispatch.has_triton():
        from sigsoftmax.backends.triton.scaling import scale_in_place

        return scale_in_place(gradient, factor)
    return gradient.mul_(factor.to(gradient.dtype))


def _keeps_graph() -> bool:
    """Whether the backward pass that is running was asked to keep the graph (retain_graph=True)."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return query is None or bool(query())


def _split_arguments(by_argument: Optional[Tensor], arguments: Sequence[Tensor]) -> list[Optional[Tensor]]:
    if by_argument is None:
        return [None] * len(arguments)
    pieces = torch.split(by_argument, [a.numel() for a in arguments])
    return [piece.view(a.shape).to(a.device, a.dtype) for piece, a in zip(pieces, arguments, strict=True)]


def _not_differentiable_again(
    outputs: tuple[Optional[Tensor], ...], through: tuple[Optional[Tensor], ...]
) -> tuple[Optional[Tensor], ...]:
    """Under create_graph=True, gradients whose own derivative raises: never silently zero.

    ``through`` leads to what they depend on; without it a derivative by that would be found unused, not raise.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return outputs
    present = [output.detach().requires_grad_() for output in outputs if output is not None]
    present += [tensor for tensor in through if tensor is not None and tensor.requires_grad]
    raising = torch._C._functions.DelayedError(NO_SECOND_DERIVATIVE, len(present))(*present)
    marked = iter(raising if isinstance(raising, tuple | list) else (raising,))
    return tuple(None if output is None else next(marked) for output in outputs)


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
    source = _dense_source(hidden, weight, bias, product_dtype, chunk_bytes, needs=(False,) * 5)
    routines = FormRows(form_by_name(form), arguments, source.logits_like)
    out_NV = source.logits_like.new_empty(source.num_tokens, source.num_classes)
    for span, _, logits_RV in source.blocks(routines.max_rows, backpropagate=False):
        if log_prior is None:
            out_NV[span] = reference.log_probs(logits_RV, routines.form, routines.arguments)
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
    source = _dense_source(hidden, weight, bias, product_dtype, chunk_bytes, needs=needs)
    routines = FormRows(form_by_name(form), arguments, source.logits_like, needs_arguments)
    prior_gradient = by_log_p.new_empty(0) if log_prior is None else log_prior.new_empty(log_prior.shape)
    for span, first_row, logits_RV in source.blocks(routines.max_rows, backpropagate=True):
        by_log_p_nV = by_log_p[span].to(routines.dtype)
        out_RV = source.gradient_rows(first_row, logits_RV)
        if log_prior is None:
            f_RV = reference.log_probs(logits_RV, routines.form, routines.arguments).exp_()
            by_phi_RV = by_log_p_nV - f_RV * by_log_p_nV.sum(-1, keepdim=True)
            routines.backpropagate(logits_RV, by_phi_RV, out_RV)
        else:
            block = MixtureBlock(routines, logits_RV, log_prior[span].to(routines.dtype), floor)
            prior_gradient[span] = block.gradient(by_log_p_nV, None, None, out_RV)
    argument_gradient = (
        torch.cat([g.flatten() for g in routines.argument_gradients()]) if needs_arguments else _empty(by_log_p)
    )
    if isinstance(source, LinearLogits):
        gradients = (source.hidden_gradient, source.weight_gradient, source.bias_gradient)
        by_hidden, by_weight, by_bias = (
            _empty(by_log_p) if gradient is None or of is None else gradient.to(of.dtype)
            for gradient, of in zip(gradients, (hidden, weight, bias), strict=True)
        )
    else:
        assert isinstance(source, GivenLogits) and source.gradient_NV is not None
        by_hidden, by_weight, by_bias = source.gradient_NV.view_as(hidden), _empty(by_log_p), _empty(by_log_p)
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
            return _empty(by_log_p)
        return torch.empty_like(of, memory_format=torch.contiguous_format)

    dtype = reference.compute_dtype(hidden.dtype if weight is None else product_dtype)
    return (
        gradient(hidden, weight is None or needs[0]),
        gradient(weight, needs[1]),
        gradient(bias, needs[2]),
        gradient(log_prior, log_prior is not None),
        by_log_p.new_empty(sum(a.numel() for a in arguments), dtype=dtype) if needs[4] else _empty(by_log_p),
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
    by_hidden, by_weight, by_bias, by_prior, *by_arguments = _not_differentiable_again(
        (*dense, *_split_arguments(by_argument, arguments)), (by_log_p, *ctx.saved_tensors)
    )
    return (by_hidden, by_weight, by_bias, by_prior, by_arguments, *(None,) * len(ctx.options))


log_probs.register_autograd(_log_probs_backward, setup_context=_log_probs_context)


def _dense_source(
    hidden: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    product_dtype: torch.dtype,
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
    )
