"""Losses of an output matrix whose rows, the classes, are spread over processes.

Every rank of the group passes the same tokens and its own classes. The ranks exchange a few numbers per token and
component (``backends.chunked.sharded_statistics``), so that each has the whole loss; nothing that is exchanged grows
with the number of classes. Backward sums the gradients of what the ranks share, ``input`` and scalar parameters of the
function; those of the weight, the bias and parameters per class stay where these are.

Shapes: N tokens (the product of all leading dimensions), K components, V classes of this rank, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import default_chunk_bytes, dtypes_of
from sigsoftmax.contract.shard import Shard
from sigsoftmax.contract.signature import autocast_dtype, is_dtensor, wants_gradient
from sigsoftmax.contract.spec import (
    Function,
    LossSpec,
    Reduction,
    WeightGradient,
    loss_spec,
    member_of,
    prior_of,
)
from sigsoftmax.distributed.agreement import agreed_sizes
from sigsoftmax.distributed.classes import ClassShards, LocalHead, own_head, own_probabilities, replicated
from sigsoftmax.distributed.exchange import sum_gradients
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.losses.extras import Extras
from sigsoftmax.losses.functional import LinearLossKwargs, MixtureLossKwargs
from sigsoftmax.losses.op import loss
from sigsoftmax.losses.validation import check_floating, check_prior, check_product, check_tensor


class _Division(TypedDict, total=False):
    group: dist.ProcessGroup | None
    shards: ClassShards | None


class _ParallelKwargs(LinearLossKwargs, _Division, total=False): ...


class _ParallelMixtureKwargs(MixtureLossKwargs, _Division, total=False): ...


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, extras: None = ..., **options: Unpack[_ParallelKwargs]
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, extras: Sequence[str], **options: Unpack[_ParallelKwargs]
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
    spec = loss_spec(
        member=member_of(function)[0],
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        weight_gradient=weight_gradient,
        chunk_bytes=chunk_bytes,
        extras=extras,
        backend=backend,
    )
    operands = Operands(input, linear_weight, linear_bias, None, target, weight, token_weights)
    return _parallel_loss(spec, operands, function, None, group, shards)


@overload
def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    extras: None = ...,
    **options: Unpack[_ParallelMixtureKwargs],
) -> Tensor: ...


@overload
def mixture_cross_entropy(
    input: Tensor,
    prior_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    extras: Sequence[str],
    **options: Unpack[_ParallelMixtureKwargs],
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
    group: dist.ProcessGroup | None = None,
    shards: ClassShards | None = None,
) -> Tensor | tuple[Tensor, Extras]:
    """:func:`sigsoftmax.mixture_cross_entropy` of divided classes; see :func:`linear_cross_entropy` here.

    ``prior_logits`` (..., K) is whole and the same on every rank, and so is its gradient.
    """
    check_floating("prior_logits", prior_logits)
    prior = prior_of(function, prior_function)
    spec = loss_spec(
        member=member_of(function)[0],
        prior=member_of(prior)[0],
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
    operands = Operands(input, linear_weight, linear_bias, prior_logits, target, weight, token_weights)
    return _parallel_loss(spec, operands, function, prior, group, shards)


def _parallel_loss(spec: LossSpec, operands: Operands, *division: Any) -> Tensor | tuple[Tensor, Extras]:
    if torch.compiler.is_compiling():
        # As a decorator it would import the compiler for everybody.
        return torch.compiler.disable(_eager_loss)(spec, operands, *division)
    return _eager_loss(spec, operands, *division)


def _eager_loss(
    spec: LossSpec,
    operands: Operands,
    function: Function,
    prior: Function | None,
    group: dist.ProcessGroup | None,
    shards: ClassShards | None,
) -> Tensor | tuple[Tensor, Extras]:
    head = own_head(operands.weight, operands.bias, OutputFunction.parse(function), group, shards)
    wanted = [operands.bias is not None, *(wants_gradient(t) for t in (operands.weight, operands.bias))]
    own_classes = operands.weight.shape[0] if head.sizes is None else head.sizes[head.exchange.rank]
    head = _with_a_class(head)
    operands = _own_operands(operands, head)
    held = {key: value for key, value in head.member.given.items() if isinstance(value, Tensor)}
    facts = _facts(spec, operands, held, wanted)
    sizes = agreed_sizes(head.exchange, own_classes, head.sizes, facts, operands.target)
    if not sum(sizes):
        raise ValueError("linear_weight has no classes on any rank; the dimension of classes must not be empty")
    shard = Shard(sizes=sizes, rank=head.exchange.rank, gather=head.exchange.gather)
    target = operands.target
    if target.is_floating_point() and shard.is_empty and target.shape[-1] == 0:
        target = torch.cat([target, target.new_zeros(*target.shape[:-1], 1)], -1)

    shared = {key: value for key, value in held.items() if head.member.kinds[key] is ParameterKind.SCALAR}
    summed = sum_gradients(head.exchange, {"input": operands.input, **shared})
    changes = {
        "input": summed.pop("input"),
        "target": target,
        "arguments": member_of(head.member.with_parameters(**summed))[1],
        "prior_arguments": () if prior is None else member_of(prior)[1],
        "shard": shard,
    }
    return loss(spec, operands._replace(**changes))


def _own_operands(operands: Operands, head: LocalHead) -> Operands:
    """The operands as plain tensors: what is whole, and this rank's part of what is divided."""
    check_tensor("target", operands.target)
    is_dense = operands.target.is_floating_point()
    target = own_probabilities(operands.target, head) if is_dense else replicated("target", operands.target, head.mesh)
    input = replicated("input", operands.input, head.mesh)
    token_weights, prior_logits = (
        None if t is None else replicated(name, t, head.mesh)
        for name, t in (("token_weights", operands.token_weights), ("prior_logits", operands.prior_logits))
    )
    if is_dtensor(operands.class_weight):
        raise ValueError("the class weights must be whole on every rank, got a DTensor; pass weight.full_tensor()")
    check_product(input, head.weight_Vd, head.bias_V, components=prior_logits is not None)
    if prior_logits is not None:
        check_prior(input, prior_logits)
    return Operands(input, head.weight_Vd, head.bias_V, prior_logits, target, operands.class_weight, token_weights)


def _facts(spec: LossSpec, operands: Operands, held: dict[str, Tensor], weights: list[bool]) -> dict[str, object]:
    """The facts that all ranks must have in common, by the words for them in a message.

    ``weights`` tells whether there is a bias, and whether weight and bias want a gradient.
    """
    input = operands.input
    product_dtype, _ = dtypes_of(input.dtype, autocast_dtype(input.device), has_weight=True, is_loss=True)
    options = {field.name: getattr(spec, field.name) for field in fields(spec)}
    options = {name: value for name, value in options.items() if name not in ("backend", "member", "prior")}
    return {
        "the shape of input": tuple(input.shape),
        "the dtype of products": product_dtype,
        "function": (spec.member.name, spec.member.values),
        "prior_function": None if spec.prior is None else (spec.prior.name, spec.prior.values),
        "whether there is a bias": weights[0],
        "which gradients are wanted": [
            *(wants_gradient(t) for t in (input, operands.prior_logits, operands.token_weights, *held.values())),
            *weights[1:],
        ],
        "whether there are token_weights": operands.token_weights is not None,
        "whether there are class weights": operands.class_weight is not None,
        **options,
        "chunk_bytes": default_chunk_bytes(spec.chunk_bytes, input.device),
    }


def _with_a_class(head: LocalHead) -> LocalHead:
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
