"""Losses of an output matrix whose rows, the classes, are spread over processes.

Every rank of the group passes the same tokens and its own classes. The ranks exchange a few numbers a token and
component (``backends.shards``), so that each has the whole loss; nothing that is exchanged grows with the number of
classes. Backward sums the gradients of what the ranks share, ``input`` and scalar parameters of the function; those of
the weight, the bias and parameters per class stay where these are.

Shapes: N tokens (the product of all leading dimensions), K components, V classes of this rank, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from sigsoftmax.backends.shards import Shard
from sigsoftmax.border import (
    Function,
    Product,
    autocasts,
    check_floating,
    check_nonnegative,
    check_prior,
    check_tensor,
    default_chunk_bytes,
    is_dtensor,
    log_prior,
    needs_gradient,
)
from sigsoftmax.distributed.agreement import agreed_sizes
from sigsoftmax.distributed.classes import ClassShards, Head, own_head, own_probabilities, replicated
from sigsoftmax.distributed.exchange import sum_gradients
from sigsoftmax.family import OutputFunction
from sigsoftmax.functional import LinearLossOptions, MixtureLossOptions
from sigsoftmax.loss import Extras, Loss, Reduction, WeightGradient
from sigsoftmax.parameters import ParameterKind


class _ParallelOptions(LinearLossOptions, total=False):
    group: dist.ProcessGroup | None
    shards: ClassShards | None


class _ParallelMixtureOptions(MixtureLossOptions, total=False):
    group: dist.ProcessGroup | None
    shards: ClassShards | None


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, extras: None = ..., **options: Unpack[_ParallelOptions]
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, extras: Sequence[str], **options: Unpack[_ParallelOptions]
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
    group: dist.ProcessGroup | None = None,
    shards: ClassShards | None = None,
) -> Tensor | tuple[Tensor, Extras]:
    """:func:`sigsoftmax.linear_cross_entropy` of classes that the ranks of ``group`` (None: all ranks) have divided.

    ``linear_weight`` is this rank's part (V, d), consecutive classes in the order of the ranks; ranks may hold
    different numbers of classes, or none. ``linear_bias`` (V,), parameters of the function per class (V,) and
    probability targets (..., V) are this rank's part as well. ``input`` (..., d), class indices in ``target`` (numbered
    over all classes), ``token_weights`` and the class weights ``weight`` (one for each of all classes) are whole and
    the same on every rank.

    Or ``linear_weight`` is a DTensor sharded by classes (``ColwiseParallel``): then everything is given whole or as a
    DTensor on its mesh, and ``group`` and ``shards`` follow from it.

    Every rank gets the same loss. Its backward must run on every rank; the gradient of ``input`` and of scalar
    parameters is then the whole one on every rank.
    """
    return _parallel_loss(
        input,
        None,
        linear_weight,
        target,
        function=function,
        prior_function=None,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        floor=0.0,
        z_loss=z_loss,
        token_weights=token_weights,
        chunk_bytes=chunk_bytes,
        weight_gradient=weight_gradient,
        backend=backend,
        extras=extras,
        group=group,
        shards=shards,
    )


@overload
def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    extras: None = ...,
    **options: Unpack[_ParallelMixtureOptions],
) -> Tensor: ...


@overload
def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    extras: Sequence[str],
    **options: Unpack[_ParallelMixtureOptions],
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
    group: dist.ProcessGroup | None = None,
    shards: ClassShards | None = None,
) -> Tensor | tuple[Tensor, Extras]:
    """:func:`sigsoftmax.mixture_cross_entropy` of divided classes; see :func:`linear_cross_entropy` here.

    ``prior_logits`` (..., K) is whole and the same on every rank, and so is its gradient.
    """
    check_floating("prior_logits", prior_logits)
    return _parallel_loss(
        input,
        prior_logits,
        linear_weight,
        target,
        function=function,
        prior_function=prior_function,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        floor=floor,
        z_loss=z_loss,
        token_weights=token_weights,
        chunk_bytes=chunk_bytes,
        weight_gradient=weight_gradient,
        backend=backend,
        extras=extras,
        group=group,
        shards=shards,
    )


def _parallel_loss(*arguments: Any, **options: Any) -> Tensor | tuple[Tensor, Extras]:
    if torch.compiler.is_compiling():
        # As a decorator it would import the compiler for everybody.
        return torch.compiler.disable(_eager_loss)(*arguments, **options)
    return _eager_loss(*arguments, **options)


def _eager_loss(
    input: Tensor,
    prior_logits: Tensor | None,
    linear_weight: Tensor,
    target: Tensor,
    *,
    function: Function,
    prior_function: Function | None,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    group: dist.ProcessGroup | None,
    shards: ClassShards | None,
    floor: float,
    token_weights: Tensor | None,
    chunk_bytes: int | None,
    **options: Any,
) -> Tensor | tuple[Tensor, Extras]:
    head = own_head(linear_weight, linear_bias, OutputFunction.parse(function), group, shards)
    check_tensor("target", target)
    is_dense = target.is_floating_point()
    target = own_probabilities(target, head) if is_dense else replicated("target", target, head.mesh)
    input = replicated("input", input, head.mesh)
    if token_weights is not None:
        token_weights = replicated("token_weights", token_weights, head.mesh)
    if weight is not None and is_dtensor(weight):
        raise ValueError("the class weights must be whole on every rank, got a DTensor; pass weight.full_tensor()")
    components = prior_logits is not None
    head = _with_a_class(head)
    product = Product.of(input, head.weight_Vd, head.bias_V, components=components)
    if prior_logits is not None:
        prior_logits = replicated("prior_logits", prior_logits, head.mesh)
        check_prior(input, prior_logits)
    check_nonnegative("floor", floor)
    chunk_bytes = default_chunk_bytes(chunk_bytes, input.device)

    held = {key: value for key, value in head.member.given.items() if isinstance(value, Tensor)}
    shared = {key: value for key, value in held.items() if head.member.kinds[key] is ParameterKind.SCALAR}
    facts = {
        "the shape of input": tuple(input.shape),
        "the dtype of products": product.dtype,
        "chunk_bytes": chunk_bytes,
        "function": (head.member.name, sorted(head.member.given)),
        "prior_function": str(prior_function),
        "floor": float(floor),
        "whether there is a bias": linear_bias is not None,
        "which gradients are wanted": [
            needs_gradient(t) for t in (input, linear_weight, linear_bias, prior_logits, token_weights, *held.values())
        ],
        "whether there are token_weights": token_weights is not None,
        "whether there are class weights": weight is not None,
        **{name: value for name, value in options.items() if name != "backend"},
    }
    own_classes = linear_weight.shape[0] if head.sizes is None else head.sizes[head.exchange.rank]
    sizes = agreed_sizes(head.exchange, own_classes, head.sizes, facts, target)
    if not sum(sizes):
        raise ValueError("linear_weight has no classes on any rank; the dimension of classes must not be empty")
    shard = Shard(sizes=sizes, rank=head.exchange.rank, gather=head.exchange.gather)
    if is_dense and shard.is_empty and target.shape[-1] == 0:
        target = torch.cat([target, target.new_zeros(*target.shape[:-1], 1)], -1)

    summed = sum_gradients(head.exchange, {"input": input, **shared})
    input = summed.pop("input")
    member = head.member.with_parameters(**summed)
    return Loss(
        leading=product.leading,
        num_classes=product.num_classes,
        dtype=torch.float32 if autocasts(input) and product.dtype != torch.float64 else product.dtype,
        product_dtype=product.dtype,
        function=member,
        target=target,
        class_weight=weight,
        token_weights=token_weights,
        chunk_bytes=chunk_bytes,
        device=input.device,
        floor=floor,
        shard=shard,
        **options,
    ).compute(
        product.hidden(input),
        head.weight_Vd,
        head.bias_V,
        None if prior_logits is None else product.flat(log_prior(prior_logits, member, prior_function)),
    )


def _with_a_class(head: Head) -> Head:
    """A rank without classes gets one that is masked, in place of special cases everywhere below."""
    if head.weight_Vd.shape[0]:
        return head
    weight, bias = head.weight_Vd, head.bias_V
    mask = weight.new_full((1,), -torch.inf)
    per_class = {
        key: torch.cat([value, value.new_zeros(1)])
        for key, value in head.member.given.items()
        if isinstance(value, Tensor) and head.member.kinds[key] is ParameterKind.PER_CLASS
    }
    return head._replace(
        weight_Vd=torch.cat([weight, weight.new_zeros(1, weight.shape[1])]),
        bias_V=mask if bias is None else torch.cat([bias, mask.to(bias.dtype)]),
        member=head.member.with_parameters(**per_class),
    )
