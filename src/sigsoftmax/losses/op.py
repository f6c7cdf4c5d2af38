"""A loss as one differentiable operation: lowered, and run by an autograd function or an op of torch.library.

torch.compile sees the op, which it keeps whole; outside of it the autograd function does the same with less overhead.
Both are thin: the way to compute the loss, its gradients included, comes from ``lowering``. The gradients of a mean or
a sum are computed with the loss; those of losses that are not reduced are computed when they are asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigsoftmax import torch_internals
from sigsoftmax.contract import value_checks
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LossResults, Problem
from sigsoftmax.contract.signature import is_recording, signature_of
from sigsoftmax.contract.spec import LossSpec, loss_spec
from sigsoftmax.contract.tokens import entropy
from sigsoftmax.losses.extras import Extras, named_extras
from sigsoftmax.losses.gradients import (
    Gradients,
    RecomputingFunction,
    StoringFunction,
    is_traced,
    not_differentiable_again,
)
from sigsoftmax.losses.lowering import REFERENCE, Lowered, lower, plain_loss
from sigsoftmax.losses.packing import (
    PackedOp,
    TracedCall,
    fake_gradients,
    packed_gradients,
    traced_problem,
    unpacked_gradients,
)
from sigsoftmax.losses.validation import loss_problem


def loss(spec: LossSpec, operands: Operands) -> Tensor | tuple[Tensor, Extras]:
    """The loss that a specification asks for; with its extras where these are asked for."""
    if is_recording():
        return _traced_loss(spec, operands)
    lowered = lower(spec, signature_of(operands))
    problem = lowered.problem
    if lowered.path is None:
        return _reference_loss(problem, operands)
    if not problem.wanted.any:
        total, *extras = _compute(lowered, operands)
    elif spec.reduction == "none":
        total, *extras = torch_internals.apply_eagerly(
            RecomputingFunction,
            _compute,
            _gradients,
            1,
            lowered,
            len(operands.arguments),
            operands.shard,
            *operands.flat,
        )
    else:
        total, _, *extras = torch_internals.apply_eagerly(
            StoringFunction, lowered, len(operands.arguments), operands.shard, *operands.flat
        )
    return total if spec.extras is None else (total, named_extras(problem, extras))


def _compute(lowered: Lowered, operands: Operands) -> tuple[Any, ...]:
    results: LossResults = lowered.path.compute(operands)
    return results.loss, *results.extras


def _gradients(lowered: Lowered, operands: Operands, by_losses: Tensor) -> Gradients:
    if is_traced(by_losses) and operands.shard is None:
        return _loss_op.gradients(lowered.problem, operands, by_losses)
    return lowered.path.compute(operands, by_losses).gradients


def _reference_loss(problem: Problem[LossSpec], operands: Operands) -> Tensor | tuple[Tensor, Extras]:
    if not is_recording() and not torch_internals.is_wrapped(operands.target):
        value_checks.check_target(problem.target(operands), problem.num_classes, problem.spec.ignore_index)
        if operands.class_weight is not None:
            value_checks.check_class_weight(operands.class_weight)
    values = plain_loss(problem, operands)
    if problem.spec.extras is None:
        return values.loss
    log_p = values.tokens.log_probs_NV
    extras = [values.tokens.log_normalizer_NK, log_p.argmax(-1), entropy(log_p)]
    return values.loss, named_extras(problem, extras)


# The op


def _compute_op(lowered: Lowered, operands: Operands, by_losses: Tensor | None) -> tuple[Tensor, ...]:
    """All results as tensors: what is absent has no elements."""
    problem, spec = lowered.problem, lowered.problem.spec
    results: LossResults = lowered.path.compute(operands, by_losses)
    numbers = operands.input.new_empty(0, dtype=problem.compute_dtype)
    log_normalizer, argmax, entropies = results.extras
    if log_normalizer is None or "log_normalizer" not in (spec.extras or ()):
        log_normalizer = numbers.new_empty(0, problem.components)
    return (
        results.loss,
        torch.empty_like(numbers) if spec.reduction == "none" else results.losses_N[: problem.num_tokens],
        log_normalizer,
        numbers.new_empty(0, dtype=torch.int64) if argmax is None else argmax,
        torch.empty_like(numbers) if entropies is None else entropies,
        *packed_gradients(results.gradients, operands, numbers),
    )


def _fake_op(call: TracedCall) -> tuple[Tensor, ...]:
    is_none, extras, tokens = call.options["reduction"] == "none", call.options["extras"], call.tokens
    arithmetic, dtype = call.dtypes(is_loss=True)
    numbers = call.operands.input.new_empty(0, dtype=arithmetic)
    return (
        numbers.new_empty(call.leading if is_none else (), dtype=dtype),
        numbers.new_empty(0 if is_none else tokens),
        numbers.new_empty(tokens if extras[0] else 0, call.components),
        numbers.new_empty(tokens if extras[1] else 0, dtype=torch.int64),
        numbers.new_empty(tokens if extras[2] else 0),
        *fake_gradients(call.operands, call.needed if is_none else call.options["wanted"], numbers),
    )


_loss_op = PackedOp("sigsoftmax::loss", LossSpec, loss_spec, 5, _compute_op, _fake_op)


def _op_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    operands = _loss_op.keep_options(ctx, inputs)
    if ctx.options["reduction"] == "none":
        ctx.save_for_backward(*operands.flat)
    else:
        _, losses, _, _, _, *gradients = output
        ctx.save_for_backward(losses, *gradients, *operands.all_arguments)


def _op_backward(ctx: Any, by_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if by_loss is None:
        return _loss_op.by_argument(ctx, [None] * len(ctx.options["wanted"]))
    if ctx.options["reduction"] == "none":
        return _loss_op.recomputed(ctx, by_loss)
    losses, *stored = ctx.saved_tensors
    scaled = [t.detach() * by_loss.to(t.dtype) for t in stored[:6]]
    gradients = unpacked_gradients(scaled, stored[6:], ctx.options["wanted"])
    return _loss_op.by_argument(ctx, not_differentiable_again(gradients, (by_loss, losses)))


_loss_op.op.register_autograd(_op_backward, setup_context=_op_context)


def _traced_loss(spec: LossSpec, operands: Operands) -> Tensor | tuple[Tensor, Extras]:
    """The loss while torch.compile looks: what is traced is validation, and the op or plain autograd."""
    assert operands.shard is None, "exchanges between processes are not compiled"
    problem, backend = traced_problem(loss_problem, spec, operands)
    if backend == REFERENCE:
        return _reference_loss(problem, operands)
    total, _, *results = _loss_op.op(*_loss_op.pack(spec, operands, problem.signature, backend))
    if spec.extras is None:
        return total
    return total, named_extras(problem, results[:3])
