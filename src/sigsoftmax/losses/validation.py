"""Validation: shapes, dtypes and devices of what users pass in, checked once for every function.

Each check says what was expected, what came, and what to do. Checks ask for shapes, dtypes and devices alone, so that
they serve for the signature of a call, and for the tensors that torch.compile traces.

Shapes: N tokens (the product of all leading dimensions), K components, V classes, d width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem, dtypes_of
from sigsoftmax.contract.signature import TensorSignature, is_dtensor
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec, MemberSpec, StatisticsSpec, check_index
from sigsoftmax.family.parameters import check_number_of_values

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""dtypes that losses and log-probabilities are computed of; those of 8 bits are for storage"""


def loss_problem(spec: LossSpec, signature: Any) -> Problem[LossSpec]:
    """A loss whose operands fit each other.

    ``signature`` is a ``Signature``; while torch.compile looks, its operands are tensors that are traced.
    """
    operands = signature.operands
    problem = _problem(spec, signature, operands)
    _check_target(spec, operands.target, problem)
    all_classes = problem.num_classes if operands.shard is None else sum(operands.shard[0])
    weight, token_weights = operands.class_weight, operands.token_weights
    if weight is not None:
        check_floating("weight", weight)
        if weight.shape != (all_classes,):
            raise ValueError(
                f"weight must hold one number per class, shape ({all_classes},), got {tuple(weight.shape)}"
            )
    if token_weights is not None:
        check_floating("token_weights", token_weights)
        if token_weights.shape != problem.leading:
            raise ValueError(
                f"token_weights must have the shape {tuple(problem.leading)}, one number per token, "
                f"got {tuple(token_weights.shape)}"
            )
    _check_device(problem.device, target=operands.target, weight=weight, token_weights=token_weights)
    return problem


def log_probs_problem(spec: LogProbsSpec, signature: Any) -> Problem[LogProbsSpec]:
    """Log-probabilities whose operands fit each other, as :func:`loss_problem`."""
    return _problem(spec, signature, signature.operands)


def statistics_problem(spec: StatisticsSpec, signature: Any) -> Problem[StatisticsSpec]:
    """Statistics of tokens whose operands fit each other, as :func:`loss_problem`."""
    target = signature.operands.target
    problem = _problem(spec, signature, signature.operands)
    if target is not None:
        check_tensor("target", target)
        _check_indices(target, problem.leading, "class indices (int64)")
        _check_device(problem.device, target=target)
    if spec.topk > problem.num_classes:
        raise ValueError(
            f"topk must be at most the number of classes, {problem.num_classes}, got {spec.topk}; pass a smaller one"
        )
    return problem


def _problem(spec: Any, signature: Any, operands: Operands) -> Problem[Any]:
    input, weight = operands.input, operands.weight
    is_mixture, is_loss = spec.prior is not None, isinstance(spec, LossSpec)
    if weight is None:
        check_floating("input", input)
        num_classes = input.shape[-1]
        check_classes("input", num_classes)
    else:
        check_product(input, weight, operands.bias, components=is_mixture)
        num_classes = weight.shape[0]
    if is_mixture:
        check_prior(input, operands.prior_logits)
        check_arguments(spec.prior, operands.prior_arguments, input.shape[-2])
    check_arguments(spec.member, operands.arguments, num_classes)
    product_dtype, dtype = dtypes_of(input.dtype, signature.autocast, has_weight=weight is not None, is_loss=is_loss)
    return Problem(
        spec=spec,
        signature=signature,
        leading=torch.Size(input.shape[: -2 if is_mixture else -1]),
        components=input.shape[-2] if is_mixture else 1,
        num_classes=num_classes,
        dtype=dtype,
        product_dtype=product_dtype,
        device=input.device,
    )


def _check_device(device: torch.device, **tensors: Any) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but the input is on {device}; move it there")


def check_arguments(member: MemberSpec, arguments: Any, num_classes: int) -> None:
    """Check that parameters per class have a number for each of the classes."""
    for key, argument in zip(member.per_class, (a for a in arguments if a.ndim), strict=False):
        check_number_of_values(member.name, key, argument, num_classes)


def _check_target(spec: LossSpec, target: Any, problem: Problem[LossSpec]) -> None:
    check_tensor("target", target)
    dense_shape = (*problem.leading, problem.num_classes)
    if target.is_floating_point():
        if target.shape != dense_shape:
            raise ValueError(
                f"probability targets must have a number per token and class, shape {dense_shape} (classes last), "
                f"got {tuple(target.shape)}; class indices must be integers, got {target.dtype}"
            )
        if spec.ignore_index >= 0:
            raise ValueError("ignore_index goes with class indices, not with probability targets")
        return
    _check_indices(target, problem.leading, "class indices (int64) or probabilities (floating)")


def _check_indices(target: Any, leading: torch.Size, wanted: str) -> None:
    """Check that there is a class index per token; ``wanted`` says what else might have been passed."""
    if target.dtype == torch.bool or target.is_complex() or target.is_floating_point():
        raise ValueError(f"target must hold {wanted}, got {target.dtype}")
    if target.shape != leading:
        raise ValueError(
            f"target must hold one class index per token, shape {tuple(leading)}, got {tuple(target.shape)}"
        )


def check_product(input: Any, weight: Any, bias: Any, *, components: bool) -> None:
    """Check hidden vectors, an output matrix and its bias, whose product are the logits."""
    check_floating("input", input)
    check_floating("linear_weight", weight)
    for name, tensor in (("input", input), ("linear_weight", weight), ("linear_bias", bias)):
        if is_dtensor(tensor):
            raise ValueError(
                f"{name} is a DTensor, which is spread over processes; use the function of the same name in "
                "sigsoftmax.distributed, or pass the whole tensor: full_tensor()"
            )
    least = 2 if components else 1
    wanted = "(..., components, features)" if components else "(..., features)"
    if input.ndim < least:
        raise ValueError(f"input must have the shape {wanted}, got {tuple(input.shape)}")
    if weight.ndim != 2:
        raise ValueError(f"linear_weight must have the shape (classes, features), got {tuple(weight.shape)}")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has {input.shape[-1]} features but linear_weight has {weight.shape[1]}: expected {wanted} and "
            f"(classes, features), got {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    check_classes("linear_weight", weight.shape[0])
    if bias is not None:
        check_floating("linear_bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"linear_bias must hold one number per class, shape ({weight.shape[0]},), got {tuple(bias.shape)}"
            )
    _check_device(input.device, linear_weight=weight, linear_bias=bias)


def check_prior(input: Any, prior_logits: Any) -> None:
    """Check that the logits of a mixture's prior fit its hidden vectors."""
    check_floating("prior_logits", prior_logits)
    if prior_logits.shape != input.shape[:-1]:
        raise ValueError(
            f"prior_logits must hold one number per token and component, shape {tuple(input.shape[:-1])} for an input "
            f"of shape {tuple(input.shape)} (..., components, features), got {tuple(prior_logits.shape)}"
        )
    if prior_logits.shape[-1] == 0:
        raise ValueError("a mixture needs at least one component, got an input with none")
    _check_device(input.device, prior_logits=prior_logits)


def check_tensor(name: str, tensor: Any) -> None:
    """Check that it is a dense tensor."""
    if not isinstance(tensor, Tensor | TensorSignature):
        kind = getattr(tensor, "kind", type(tensor))
        raise ValueError(f"{name} must be a tensor, got {kind.__name__}")
    if tensor.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one; pass its values() with one target for each of their "
            "rows, or torch.nested.to_padded_tensor(...) with ignore_index"
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{name} must be a dense tensor, got one of layout {tensor.layout}; convert it with .to_dense()"
        )


def check_floating(name: str, tensor: Any) -> None:
    """Check that it is a dense tensor of a dtype that is computed with."""
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}; convert it with .float()")
    if tensor.dtype not in FLOATING:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        raise ValueError(f"{name} must be one of {known}, got {tensor.dtype}; convert it with .to(torch.bfloat16)")


def check_dim(tensor: Tensor, dim: int) -> None:
    """Check that a tensor has this dimension."""
    check_index("dim", dim)
    rank = max(1, tensor.ndim)
    if not -rank <= dim < rank:
        raise ValueError(
            f"dim must lie in [{-rank}, {rank - 1}] for a tensor of shape {tuple(tensor.shape)}, got {dim}"
        )


def check_classes(name: str, classes: int) -> None:
    """Check that there are classes at all."""
    if classes == 0:
        raise ValueError(f"{name} has no classes; the dimension of classes must not be empty")
