"""The functions, named, placed and meant as in torch.nn.functional, plus ``function``: which output function.

Shapes: N tokens (the product of all leading dimensions), K components, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from sigsoftmax import known_calls
from sigsoftmax.backends import dispatch, log_probs_op, reference
from sigsoftmax.border import (
    Function,
    Product,
    autocasts,
    check_classes,
    check_dim,
    check_floating,
    check_nonnegative,
    check_prior,
    check_tensor,
    default_chunk_bytes,
    log_prior,
    needs_gradient,
    prior_of,
)
from sigsoftmax.family import OutputFunction
from sigsoftmax.loss import Extras, Loss, Reduction, WeightGradient


def sigsoftmax(input: Tensor, dim: int = -1) -> Tensor:
    """exp(z) sigmoid(z), normalised over ``dim``. The counterpart of ``torch.softmax``.

    >>> sigsoftmax(torch.tensor([0.0, 0.0]))
    tensor([0.5000, 0.5000])
    """
    return probs(input, function="sigsoftmax", dim=dim)


def log_sigsoftmax(input: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of :func:`sigsoftmax`, without rounding it to -inf. The counterpart of ``torch.log_softmax``."""
    return log_probs(input, function="sigsoftmax", dim=dim)


def probs(logits: Tensor, *, function: Function, dim: int = -1, backend: str | None = None) -> Tensor:
    """Probabilities of every class along ``dim``."""
    return log_probs(logits, function=function, dim=dim, backend=backend).exp()


def log_probs(logits: Tensor, *, function: Function, dim: int = -1, backend: str | None = None) -> Tensor:
    """Log-probabilities of every class along ``dim``, in the dtype of ``logits``; -inf masks a class."""
    check_floating("logits", logits)
    check_dim(logits, dim)
    if logits.ndim == 0:
        return log_probs(logits.unsqueeze(0), function=function, backend=backend).squeeze(0)
    rows = logits.movedim(dim, -1)
    check_classes("logits", rows.shape[-1])
    member = OutputFunction.parse(function)
    arguments = member.arguments(rows.shape[-1])
    if dispatch.choose(backend, member.form, logits.dtype, (logits, *arguments)) == "reference":
        out = reference.log_probs(rows, member.form, arguments).to(logits.dtype)
    else:
        hidden = rows.reshape(-1, 1, rows.shape[-1])
        needs = [needs_gradient(t) for t in (logits, None, None, None)] + [any(map(needs_gradient, arguments))]
        flat = log_probs_op.log_probs(
            hidden, None, None, None, arguments, member.form.name, 0.0, 0, logits.dtype, needs
        )
        out = flat.view(rows.shape)
    return out.movedim(-1, dim)


def mixture_log_probs(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    *,
    function: Function,
    prior_function: Function | None = None,
    linear_bias: Tensor | None = None,
    floor: float = 0.0,
    chunk_bytes: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Log-probabilities of a mixture of K output functions that share one output matrix, (..., V).

    ``input`` is (..., K, d), one hidden vector per component, ``prior_logits`` (..., K). The mixture is exact in log
    space; ``floor`` adds a constant to every probability, as the published MoS code does with 1e-8 (the result is then
    not normalised). ``prior_function`` None means ``function`` if that has no parameters, else softmax.
    """
    member = OutputFunction.parse(function)
    product = Product.of(input, linear_weight, linear_bias, components=True)
    check_prior(input, prior_logits)
    check_nonnegative("floor", floor)
    arguments = member.arguments(product.num_classes)
    log_prior_NK = product.flat(log_prior(prior_logits, member, prior_function, backend))
    tensors = (input, prior_logits, linear_weight, linear_bias, *arguments)
    if dispatch.choose(backend, member.form, product.dtype, tensors) == "reference":
        logits_NKV = product.logits(input, linear_weight, linear_bias, member, arguments)
        flat = reference.mixture_log_probs(logits_NKV, log_prior_NK, member.form, arguments, floor).to(product.dtype)
    else:
        needs = [needs_gradient(t) for t in (input, linear_weight, linear_bias, log_prior_NK)] + [
            any(map(needs_gradient, arguments))
        ]
        flat = log_probs_op.log_probs(
            product.hidden(input),
            linear_weight,
            linear_bias,
            log_prior_NK,
            arguments,
            member.form.name,
            floor,
            default_chunk_bytes(chunk_bytes, input.device, product.num_classes),
            product.dtype,
            needs,
        )
    return flat.view(*product.leading, product.num_classes)


class LossOptions(TypedDict, total=False):
    """The keywords that all losses share."""

    function: Required[Function]
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    token_weights: Tensor | None
    chunk_bytes: int | None
    backend: str | None


class LinearLossOptions(LossOptions, total=False):
    linear_bias: Tensor | None
    weight: Tensor | None
    weight_gradient: WeightGradient


class MixtureLossOptions(LinearLossOptions, total=False):
    prior_function: Function | None
    floor: float


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = ...,
    *,
    dim: int | None = ...,
    extras: None = ...,
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = ...,
    *,
    dim: int | None = ...,
    extras: Sequence[str],
    **options: Unpack[LossOptions],
) -> tuple[Tensor, Extras]: ...


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    function: Function,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    dim: int | None = None,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_bytes: int | None = None,
    backend: str | None = None,
    extras: Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, Extras]:
    """Cross-entropy of logits; with ``function="softmax"`` it is ``torch.nn.functional.cross_entropy``.

    The classes are dimension 1 of ``input`` (0 if it has one dimension); ``dim`` overrides that. ``target`` holds class
    indices or probabilities, as in torch. Beyond torch: ``z_loss`` adds ``z_loss * n^2`` per token with n the log
    normaliser, ``token_weights`` (in the shape of index targets) count each token, ``extras`` returns
    ``(loss, Extras)``. ``chunk_bytes`` has no effect here, since the caller holds the logits.
    """
    tensors, key = (input, None, None, target), None
    if weight is None and token_weights is None and extras is None and dim is None:
        budget = (chunk_bytes, type(chunk_bytes))
        options = (function, reduction, ignore_index, label_smoothing, z_loss, *budget, backend)
        key = known_calls.key_of(tensors, options)
        if key is not None and (loss := known_calls.loss_of(key, tensors)) is not None:
            return loss
    check_floating("input", input)
    if input.ndim == 0:
        raise ValueError("input must have a dimension of classes, got a scalar; logits are (C,), (N, C) or (N, C, ...)")
    class_dim = (0 if input.ndim == 1 else 1) if dim is None else dim
    check_dim(input, class_dim)
    rows = input.movedim(class_dim, -1)
    check_classes("input", rows.shape[-1])
    check_tensor("target", target)
    if target.is_floating_point() and target.shape == input.shape:
        target = target.movedim(class_dim, -1)
    call = Loss(
        leading=rows.shape[:-1],
        num_classes=rows.shape[-1],
        dtype=torch.float32 if autocasts(input) and input.dtype != torch.float64 else input.dtype,
        product_dtype=input.dtype,
        function=function,
        target=target,
        class_weight=weight,
        token_weights=token_weights,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        extras=extras,
        backend=backend,
        chunk_bytes=default_chunk_bytes(chunk_bytes, input.device),
        device=input.device,
    )
    if key is not None:
        plan = call.plan(*tensors) if class_dim == input.ndim - 1 else None
        if (loss := known_calls.learn(key, plan, call.decision, tensors)) is not None:
            return loss
    return call.compute(rows.reshape(-1, 1, rows.shape[-1]), None, None, None)


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, extras: None = ..., **options: Unpack[LinearLossOptions]
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, extras: Sequence[str], **options: Unpack[LinearLossOptions]
) -> tuple[Tensor, Extras]: ...


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    function: Function,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_bytes: int | None = None,
    weight_gradient: WeightGradient = "auto",
    backend: str | None = None,
    extras: Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, Extras]:
    """Cross-entropy of ``input @ linear_weight.T + linear_bias`` without ever holding these N x V logits.

    ``input`` is (..., d), ``linear_weight`` (V, d), ``target`` (...) of class indices or (..., V) of probabilities.
    ``weight_gradient`` says how the gradient of a weight of low precision is summed over chunks: ``fast`` in its own
    dtype, ``buffered`` in a float32 buffer, ``exact`` by one product for each range of classes, which takes a float32
    buffer for the gradient of ``input`` and computes again those logits that do not fit into the weight's gradient
    meanwhile; float32 weights are summed in place. ``auto`` is buffered on a CPU and where that buffer is smaller than
    exact's or small beside a chunk, else exact.

    Logits exist a chunk of ``chunk_bytes`` at a time (by default 32 MiB on a CPU, 576 MiB on a GPU). Input and weight
    may differ in dtype: the products run in the input's (under autocast in autocast's), the weight keeps a gradient of
    its own.
    """
    tensors, key = (input, linear_weight, linear_bias, target), None
    if weight is None and token_weights is None and extras is None:
        budget = (chunk_bytes, type(chunk_bytes))
        options = (function, reduction, ignore_index, label_smoothing, z_loss, *budget, weight_gradient, backend)
        key = known_calls.key_of(tensors, options)
        if key is not None and (loss := known_calls.loss_of(key, tensors)) is not None:
            return loss
    product = Product.of(input, linear_weight, linear_bias, components=False)
    call = Loss(
        leading=product.leading,
        num_classes=product.num_classes,
        dtype=torch.float32 if autocasts(input) and product.dtype != torch.float64 else product.dtype,
        product_dtype=product.dtype,
        function=function,
        target=target,
        class_weight=weight,
        token_weights=token_weights,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        extras=extras,
        backend=backend,
        chunk_bytes=default_chunk_bytes(chunk_bytes, input.device),
        device=input.device,
        weight_gradient=weight_gradient,
    )
    if key is not None:
        plan = call.plan(*tensors)
        if (loss := known_calls.learn(key, plan, call.decision, tensors)) is not None:
            return loss
    return call.compute(product.hidden(input), linear_weight, linear_bias, None)


@overload
def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    extras: None = ...,
    **options: Unpack[MixtureLossOptions],
) -> Tensor: ...


@overload
def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    extras: Sequence[str],
    **options: Unpack[MixtureLossOptions],
) -> tuple[Tensor, Extras]: ...


def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    function: Function,
    prior_function: Function | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    floor: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_bytes: int | None = None,
    weight_gradient: WeightGradient = "auto",
    backend: str | None = None,
    extras: Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, Extras]:
    """Cross-entropy of a mixture (MoS, MoSS) without ever holding N x K x V; see :func:`mixture_log_probs`.

    ``z_loss`` weighs the squared log normaliser of each component by its prior, which it does not train. Label
    smoothing, probability targets, argmax and entropy need the mixed probability of every class and cost more.
    """
    tensors, key = (input, prior_logits, linear_weight, linear_bias, target), None
    if weight is None and token_weights is None and extras is None and label_smoothing == 0.0:
        options = (
            *(function, prior_function, reduction, ignore_index, floor),
            *(z_loss, chunk_bytes, type(chunk_bytes), weight_gradient, backend),
        )
        key = known_calls.key_of(tensors, options)
        if key is not None and (loss := known_calls.loss_of(key, tensors)) is not None:
            return loss
    product = Product.of(input, linear_weight, linear_bias, components=True)
    check_prior(input, prior_logits)
    check_nonnegative("floor", floor)
    member = OutputFunction.parse(function)
    call = Loss(
        leading=product.leading,
        num_classes=product.num_classes,
        dtype=torch.float32 if autocasts(input) and product.dtype != torch.float64 else product.dtype,
        product_dtype=product.dtype,
        function=member,
        target=target,
        class_weight=weight,
        token_weights=token_weights,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        extras=extras,
        backend=backend,
        chunk_bytes=default_chunk_bytes(chunk_bytes, input.device, product.num_classes),
        device=input.device,
        floor=floor,
        weight_gradient=weight_gradient,
    )
    if key is not None:
        plan = call.mixture_plan(*tensors, prior_of(member, prior_function))
        if (loss := known_calls.learn(key, plan, call.decision, tensors)) is not None:
            return loss
    return call.compute(
        product.hidden(input),
        linear_weight,
        linear_bias,
        product.flat(log_prior(prior_logits, member, prior_function, backend)),
    )
