"""A loss as one differentiable operation: lowered, and run by an autograd function or an op of torch.library.

torch.compile sees the op, which it keeps whole; outside of it the autograd function does the same with less overhead.
Both are thin: the way to compute the loss, its gradients included, comes from ``lowering``. The gradients of a mean or
a sum are computed with the loss; those of losses that are not reduced are computed when they are asked for.
"""

# No postponed annotations here: torch.library reads the schema from them.
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from sigsoftmax import torch_internals
from sigsoftmax.contract import value_checks
from sigsoftmax.contract.operands import Operands, Wanted
from sigsoftmax.contract.problem import LossResults, Problem, dtypes_of
from sigsoftmax.contract.rows import compute_dtype
from sigsoftmax.contract.signature import signature_inside_op, signature_of
from sigsoftmax.contract.spec import EXTRAS, LossSpec
from sigsoftmax.contract.tokens import entropy
from sigsoftmax.losses.gradients import is_traced, joined, not_differentiable_again, nothing_for, split, times
from sigsoftmax.losses.lowering import REFERENCE, Lowered, lower, plain_loss
from sigsoftmax.losses.packing import LOSS_FIELDS, pack_loss, traced_signature, unpack_loss
from sigsoftmax.losses.validation import loss_problem


class Extras(NamedTuple):
    """What a loss can tell besides, detached, in the shape of the targets; None where it was not asked for."""

    log_normalizer: Optional[Tensor] = None
    """log sum_j g(z_j); for a mixture one per component, (..., K)"""
    argmax: Optional[Tensor] = None
    entropy: Optional[Tensor] = None


def loss(spec: LossSpec, operands: Operands) -> Union[Tensor, tuple[Tensor, Extras]]:
    """The loss that a specification asks for; with its extras where these are asked for."""
    if torch.compiler.is_compiling():
        return _traced_loss(spec, operands)
    lowered = lower(spec, signature_of(operands))
    problem = lowered.problem
    if lowered.path is None:
        return _reference_loss(problem, operands)
    if problem.wanted.any:
        total, *others = torch_internals.apply_eagerly(
            _EagerLoss, lowered, operands.shard, len(operands.arguments), *operands.flat
        )
        extras = others[-3:]
    else:
        results: LossResults = lowered.path.compute(operands)
        total, extras = results.loss, list(results[2:5])
    return total if spec.extras is None else (total, _extras(problem, extras))


def _extras(problem: Problem[LossSpec], values: Sequence[Optional[Tensor]]) -> Extras:
    shapes = ((*problem.leading, problem.components) if problem.spec.prior else problem.leading, problem.leading)
    wanted = problem.spec.extras or ()
    return Extras(
        *(
            value.detach().view(shapes[name != "log_normalizer"]) if name in wanted and value is not None else None
            for name, value in zip(EXTRAS, values, strict=True)
        )
    )


def _reference_loss(problem: Problem[LossSpec], operands: Operands) -> Union[Tensor, tuple[Tensor, Extras]]:
    if not torch.compiler.is_compiling() and not torch_internals.is_wrapped(operands.target):
        value_checks.check_target(problem.target(operands), problem.num_classes, problem.spec.ignore_index)
        if operands.class_weight is not None:
            value_checks.check_class_weight(operands.class_weight)
    values = plain_loss(problem, operands)
    if problem.spec.extras is None:
        return values.loss
    log_p = values.tokens.log_probs_NV
    extras = [values.tokens.log_normalizer_NK, log_p.argmax(-1), entropy(log_p)]
    return values.loss, _extras(problem, extras)


# The autograd function


class _EagerLoss(torch.autograd.Function):
    """Outside torch.compile: calls through torch.library cost more than a small loss."""

    @staticmethod
    def forward(
        ctx: Any, lowered: Lowered, shard: Any, arguments: int, *tensors: Optional[Tensor]
    ) -> tuple[Optional[Tensor], ...]:
        results: LossResults = lowered.path.compute(Operands.from_flat(tensors, arguments, shard))
        extras = results[2:5]
        ctx.set_materialize_grads(False)
        ctx.lowered, ctx.shard, ctx.arguments = lowered, shard, arguments
        ctx.mark_non_differentiable(*(extra for extra in extras if extra is not None))
        if lowered.problem.spec.reduction == "none":
            ctx.save_for_backward(*tensors)
            return results.loss, *extras
        # An output leads a second derivative to the inputs; not the loss, which its owner may change.
        ctx.save_for_backward(results.losses_N, *results.gradients)
        return results.loss, results.losses_N, *extras

    @staticmethod
    def backward(ctx: Any, *by_outputs: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        by_loss, path = by_outputs[0], ctx.lowered.path
        saved = ctx.saved_tensors
        if by_loss is None:
            gradients: Sequence[Optional[Tensor]] = (None,) * (len(ctx.needs_input_grad) - 5)
        elif ctx.lowered.problem.spec.reduction == "none":
            operands = Operands.from_flat(saved, ctx.arguments, ctx.shard)
            with torch.no_grad():
                if is_traced(by_loss) and ctx.shard is None:
                    gradients = _traced_gradients(ctx.lowered.problem, operands, by_loss)
                else:
                    gradients = path.compute(operands, by_loss).gradients
            gradients = not_differentiable_again(gradients, (by_loss, *saved))
        else:
            losses, *stored = saved
            # Saved outputs come back as results; a gradient that wants a gradient is for create_graph alone.
            kept = [None if t is None else t.detach() if t.requires_grad else t for t in stored]
            gradients = not_differentiable_again(times(kept, by_loss, path.scale), (by_loss, losses))
        by_input, by_weight, by_bias, by_prior, by_token_weights, *by_arguments = gradients
        return (
            *(None, None, None),
            *(by_input, by_weight, by_bias, by_prior, None, None, by_token_weights),
            *by_arguments,
        )


# The op


def _compute_op(input: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """All results as tensors: what is absent has no elements."""
    spec, operands, wanted, autocast, by_losses = unpack_loss(input, *inputs)
    signature = signature_inside_op(operands, wanted, autocast)
    lowered = lower(spec, signature)
    results: LossResults = lowered.path.compute(operands, by_losses)
    dense, by_arguments = results.gradients[:5], results.gradients[5:]
    tokens, wanted_extras = lowered.problem.num_tokens, spec.extras or ()
    numbers = input.new_empty(0, dtype=lowered.problem.compute_dtype)

    def present(result: Optional[Tensor], dtype: torch.dtype = numbers.dtype) -> Tensor:
        # Outputs of an op must not share memory, be they empty.
        return numbers.new_empty(0, dtype=dtype) if result is None else result

    log_normalizer = results.log_normalizer_NK
    if log_normalizer is None or "log_normalizer" not in wanted_extras:
        log_normalizer = numbers.new_empty(0, lowered.problem.components)
    return (
        results.loss,
        present(None) if spec.reduction == "none" else results.losses_N[:tokens],
        log_normalizer,
        present(results.argmax_N, torch.int64),
        present(results.entropy_N),
        *map(present, dense),
        joined(by_arguments, (*operands.arguments, *operands.prior_arguments), numbers),
    )


def _fake_op(
    input: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    prior_logits: Optional[Tensor],
    target: Tensor,
    class_weight: Optional[Tensor],
    token_weights: Optional[Tensor],
    arguments: Sequence[Tensor],
    prior_arguments: Sequence[Tensor],
    by_losses: Optional[Tensor],
    form: str,
    values: Sequence[float],
    kinds: Sequence[int],
    prior_form: Optional[str],
    prior_values: Sequence[float],
    prior_kinds: Sequence[int],
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    floor: float,
    weight_gradient: str,
    chunk_bytes: Optional[int],
    extras: Sequence[bool],
    backend: Optional[str],
    autocast: Optional[torch.dtype],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    is_mixture, is_none = prior_form is not None, reduction == "none"
    leading = input.shape[:-2] if is_mixture else input.shape[:-1]
    components = input.shape[-2] if is_mixture else 1
    tokens = leading.numel()
    product_dtype, dtype = dtypes_of(input.dtype, autocast, has_weight=weight is not None, is_loss=True)
    numbers = input.new_empty(0, dtype=compute_dtype(product_dtype))
    has_gradients = not is_none or by_losses is not None

    def gradient(of: Optional[Tensor], needed: bool) -> Tensor:
        if of is None or not (needed and has_gradients):
            return torch.empty_like(numbers)
        return torch.empty_like(of, memory_format=torch.contiguous_format)

    flags = Wanted.of(wanted, len(arguments))
    learned = has_gradients and any((*flags.arguments, *flags.prior_arguments))
    return (
        numbers.new_empty(leading if is_none else (), dtype=dtype),
        numbers.new_empty(0 if is_none else tokens),
        numbers.new_empty(tokens if extras[0] else 0, components),
        input.new_empty(tokens if extras[1] else 0, dtype=torch.int64),
        numbers.new_empty(tokens if extras[2] else 0),
        gradient(input, flags.input),
        gradient(weight, flags.weight),
        gradient(bias, flags.bias),
        gradient(prior_logits, flags.prior_logits),
        gradient(token_weights, flags.token_weights),
        numbers.new_empty(sum(a.numel() for a in (*arguments, *prior_arguments)) if learned else 0),
    )


_loss_op = torch.library.custom_op(
    "sigsoftmax::loss",
    _compute_op,
    mutates_args=(),
    schema=torch.library.infer_schema(_fake_op, mutates_args=()),
)
_loss_op.register_fake(_fake_op)


def _op_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, losses, _, _, _, *gradients = output
    ctx.set_materialize_grads(False)
    ctx.arguments = len(inputs[7])
    ctx.is_none = inputs[LOSS_FIELDS.index("reduction")] == "none"
    ctx.options, ctx.wanted = inputs[10:], inputs[-1]
    tensors = (*inputs[:7], *inputs[7], *inputs[8])
    if ctx.is_none:
        ctx.save_for_backward(*tensors)
    else:
        ctx.save_for_backward(losses, *gradients, *inputs[7], *inputs[8])


def _op_backward(ctx: Any, by_loss: Optional[Tensor], *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    count = ctx.arguments
    arguments = saved[7:]
    if by_loss is None:
        gradients: Sequence[Optional[Tensor]] = (None,) * len(ctx.wanted)
    elif ctx.is_none:
        inputs = (*saved[:7], list(saved[7 : 7 + count]), list(saved[7 + count :]), by_loss, *ctx.options)
        results = _loss_op(*inputs) if is_traced(by_loss) else _compute_op(*inputs)
        gradients = split(results[5:-1], results[-1], arguments, ctx.wanted)
        gradients = not_differentiable_again(gradients, (by_loss, *saved))
    else:
        losses, *stored = saved[:7]
        kept = [t.detach() if t.requires_grad else t for t in stored]
        scaled = [gradient * by_loss.to(gradient.dtype) for gradient in kept]
        gradients = not_differentiable_again(split(scaled[:-1], scaled[-1], arguments, ctx.wanted), (by_loss, losses))
    by_input, by_weight, by_bias, by_prior, by_token_weights, *by_arguments = gradients
    dense = (by_input, by_weight, by_bias, by_prior, None, None, by_token_weights)
    return (*dense, by_arguments[:count], by_arguments[count:], None, *nothing_for(ctx.options))


_loss_op.register_autograd(_op_backward, setup_context=_op_context)


def _traced_loss(spec: LossSpec, operands: Operands) -> Union[Tensor, tuple[Tensor, Extras]]:
    """The loss while torch.compile looks: what is traced is validation, and the op or plain autograd."""
    assert operands.shard is None, "exchanges between processes are not compiled"
    signature, backend = traced_signature(spec, operands)
    problem = loss_problem(spec, signature)
    if backend == REFERENCE:
        return _reference_loss(problem, operands)
    packed = pack_loss(spec, operands, None, signature.wanted, signature.autocast, backend)
    total, _, *results = _loss_op(*packed)
    if spec.extras is None:
        return total
    return total, _extras(problem, results[:3])


def _traced_gradients(problem: Problem[LossSpec], operands: Operands, by_losses: Tensor) -> Sequence[Optional[Tensor]]:
    backend = problem.spec.backend or problem.signature.backend_variable
    packed = pack_loss(problem.spec, operands, by_losses, problem.wanted, problem.signature.autocast, backend)
    arguments = (*operands.arguments, *operands.prior_arguments)
    *dense, of_arguments = _loss_op(*packed)[5:]
    return split(dense, of_arguments, arguments, problem.wanted.flat)
