"""The functions, with the convention that functions, modules and layers of this package share.

What torch has too is named, placed and meant as in torch (``torch.nn.functional`` here). What torch does not have is
given by name, and ``function``, the output function, is "sigsoftmax" unless it is given.

Shapes: N tokens (the product of all leading dimensions), K components, V classes, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack, cast, overload

from torch import Tensor

from sigsoftmax._old_calls import was_named
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.spec import (
    Function,
    Reduction,
    WeightGradient,
    log_probs_spec,
    loss_spec,
    member_of,
    prior_of,
)
from sigsoftmax.losses import log_probs_op
from sigsoftmax.losses.extras import Extras
from sigsoftmax.losses.op import loss
from sigsoftmax.losses.validation import check_classes, check_dim, check_floating, check_tensor


def sigsoftmax(input: Tensor, dim: int = -1) -> Tensor:
    """exp(z) sigmoid(z), normalised over ``dim``. The counterpart of ``torch.softmax``.

    >>> import torch
    >>> sigsoftmax(torch.tensor([0.0, 0.0]))
    tensor([0.5000, 0.5000])
    """
    return probs(input, function="sigsoftmax", dim=dim)


def log_sigsoftmax(input: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of :func:`sigsoftmax`, without rounding it to -inf. The counterpart of ``torch.log_softmax``."""
    return log_probs(input, function="sigsoftmax", dim=dim)


@was_named("logits", "input")
def probs(input: Tensor, dim: int = -1, *, function: Function = "sigsoftmax", backend: str | None = None) -> Tensor:
    """Probabilities of every class along ``dim``: ``torch.softmax`` with any output function."""
    return log_probs(input, dim, function=function, backend=backend).exp()


@was_named("logits", "input")
def log_probs(input: Tensor, dim: int = -1, *, function: Function = "sigsoftmax", backend: str | None = None) -> Tensor:
    """Log-probabilities of every class along ``dim``: ``torch.log_softmax`` with any output function.

    ``input`` are the logits; -inf masks a class. The result has their dtype.
    """
    check_floating("input", input)
    check_dim(input, dim)
    if input.ndim == 0:
        return log_probs(input.unsqueeze(0), function=function, backend=backend).squeeze(0)
    member, arguments = member_of(function)
    spec = log_probs_spec(member=member, backend=backend)
    out = cast("Tensor", log_probs_op.log_probs(spec, Operands(input.movedim(dim, -1), arguments=arguments)))
    return out.movedim(-1, dim)


class MixtureKwargs(TypedDict, total=False):
    """The keywords that a mixture has beside its tensors."""

    function: Function
    prior_function: Function | None
    linear_bias: Tensor | None
    floor: float
    chunk_bytes: int | None
    backend: str | None


@overload
def mixture_log_probs(
    input: Tensor, prior_logits: Tensor, linear_weight: Tensor, *, extras: None = ..., **options: Unpack[MixtureKwargs]
) -> Tensor: ...


@overload
def mixture_log_probs(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    *,
    extras: Sequence[str],
    **options: Unpack[MixtureKwargs],
) -> tuple[Tensor, Extras]: ...


def mixture_log_probs(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    *,
    function: Function = "sigsoftmax",
    prior_function: Function | None = None,
    linear_bias: Tensor | None = None,
    floor: float = 0.0,
    chunk_bytes: int | None = None,
    backend: str | None = None,
    extras: Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, Extras]:
    """Log-probabilities of a mixture of K output functions that share one output matrix, (..., V).

    ``input`` is (..., K, d), one hidden vector per component, ``prior_logits`` (..., K). The mixture is exact in log
    space, in the dtype of ``input`` (under autocast float32); ``floor`` adds a constant to every probability, as the
    published MoS code does with 1e-8 (the result is then not normalised). ``prior_function`` None means ``function`` if
    that has no parameters, else softmax. ``extras=["log_normalizer"]`` returns ``(log_probs, Extras)`` with the log
    normaliser of each component, (..., K), from the same pass over the logits.
    """
    member, arguments = member_of(function)
    prior, prior_arguments = member_of(prior_of(function, prior_function))
    spec = log_probs_spec(
        member=member, prior=prior, floor=floor, chunk_bytes=chunk_bytes, backend=backend, extras=extras
    )
    operands = Operands(
        input, linear_weight, linear_bias, prior_logits, arguments=arguments, prior_arguments=prior_arguments
    )
    return log_probs_op.log_probs(spec, operands)


class LossKwargs(TypedDict, total=False):
    """The keywords that all losses share."""

    function: Function
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    token_weights: Tensor | None
    chunk_bytes: int | None
    backend: str | None


class LinearLossKwargs(LossKwargs, total=False):
    linear_bias: Tensor | None
    weight: Tensor | None
    weight_gradient: WeightGradient


class MixtureLossKwargs(LinearLossKwargs, total=False):
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
    **options: Unpack[LossKwargs],
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = ...,
    *,
    dim: int | None = ...,
    extras: Sequence[str],
    **options: Unpack[LossKwargs],
) -> tuple[Tensor, Extras]: ...


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    function: Function = "sigsoftmax",
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
    if dim is not None or not isinstance(input, Tensor) or input.ndim != 2:
        input, target = _classes_last(input, target, dim)
    member, arguments = member_of(function)
    spec = loss_spec(
        member=member,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        chunk_bytes=chunk_bytes,
        extras=extras,
        backend=backend,
    )
    operands = Operands(input, target=target, class_weight=weight, token_weights=token_weights, arguments=arguments)
    return loss(spec, operands)


def _classes_last(input: Tensor, target: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """Logits and targets with the dimension of the classes at the end."""
    check_floating("input", input)
    if input.ndim == 0:
        raise ValueError("input must have a dimension of classes, got a scalar; logits are (C,), (N, C) or (N, C, ...)")
    class_dim = (0 if input.ndim == 1 else 1) if dim is None else dim
    check_dim(input, class_dim)
    check_classes("input", input.shape[class_dim])
    check_tensor("target", target)
    if target.is_floating_point() and target.shape == input.shape:
        target = target.movedim(class_dim, -1)
    return input.movedim(class_dim, -1), target


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, extras: None = ..., **options: Unpack[LinearLossKwargs]
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, extras: Sequence[str], **options: Unpack[LinearLossKwargs]
) -> tuple[Tensor, Extras]: ...


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    function: Function = "sigsoftmax",
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
    member, arguments = member_of(function)
    spec = loss_spec(
        member=member,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        weight_gradient=weight_gradient,
        chunk_bytes=chunk_bytes,
        extras=extras,
        backend=backend,
    )
    operands = Operands(input, linear_weight, linear_bias, None, target, weight, token_weights, arguments)
    return loss(spec, operands)


@overload
def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    extras: None = ...,
    **options: Unpack[MixtureLossKwargs],
) -> Tensor: ...


@overload
def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    extras: Sequence[str],
    **options: Unpack[MixtureLossKwargs],
) -> tuple[Tensor, Extras]: ...


def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    function: Function = "sigsoftmax",
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
    member, arguments = member_of(function)
    prior, prior_arguments = member_of(prior_of(function, prior_function))
    spec = loss_spec(
        member=member,
        prior=prior,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        floor=floor,
        weight_gradient=weight_gradient,
        chunk_bytes=chunk_bytes,
        extras=extras,
        backend=backend,
    )
    operands = Operands(
        *(input, linear_weight, linear_bias, prior_logits, target, weight, token_weights),
        arguments=arguments,
        prior_arguments=prior_arguments,
    )
    return loss(spec, operands)
