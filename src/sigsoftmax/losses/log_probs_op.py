"""Log-probabilities of every class as one differentiable operation, lowered and run as losses are (``op``)."""

# No postponed annotations here: torch.library reads the schemas from them.
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from sigsoftmax import torch_internals
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import dtypes_of
from sigsoftmax.contract.signature import signature_inside_op, signature_of
from sigsoftmax.contract.spec import LogProbsSpec
from sigsoftmax.losses.gradients import is_traced, joined, not_differentiable_again, nothing_for, split
from sigsoftmax.losses.lowering import REFERENCE, Lowered, lower, plain_log_probs
from sigsoftmax.losses.packing import pack_log_probs, traced_signature, unpack_log_probs
from sigsoftmax.losses.validation import log_probs_problem


def log_probs(spec: LogProbsSpec, operands: Operands) -> Tensor:
    """Log-probabilities of every class, in the leading dimensions and the classes."""
    if torch.compiler.is_compiling():
        return _traced_log_probs(spec, operands)
    lowered = lower(spec, signature_of(operands))
    problem = lowered.problem
    if lowered.path is None:
        return plain_log_probs(problem, operands)
    if problem.wanted.any:
        tensors = (*operands[:4], *operands.arguments, *operands.prior_arguments)
        out_NV = torch_internals.apply_eagerly(_EagerLogProbs, lowered, len(operands.arguments), *tensors)
    else:
        out_NV = lowered.path.compute(operands)
    return out_NV.view(*problem.leading, problem.num_classes)


def _operands(tensors: Sequence[Optional[Tensor]], arguments: int) -> Operands:
    """From input, weight, bias and prior logits, and the arguments of the forms."""
    return Operands.from_flat([*tensors[:4], None, None, None, *tensors[4:]], arguments)


class _EagerLogProbs(torch.autograd.Function):
    """Outside torch.compile, as for losses."""

    @staticmethod
    def forward(ctx: Any, lowered: Lowered, arguments: int, *tensors: Optional[Tensor]) -> Tensor:
        ctx.lowered, ctx.arguments = lowered, arguments
        ctx.save_for_backward(*tensors)
        return lowered.path.compute(_operands(tensors, arguments))

    @staticmethod
    def backward(ctx: Any, *by_outputs: Tensor) -> tuple[Optional[Tensor], ...]:
        (by_log_p_NV,) = by_outputs
        saved, problem = ctx.saved_tensors, ctx.lowered.problem
        operands = _operands(saved, ctx.arguments)
        gradients: Sequence[Optional[Tensor]]
        with torch.no_grad():
            if is_traced(by_log_p_NV):
                backend = problem.spec.backend or problem.signature.backend_variable
                packed = pack_log_probs(problem.spec, operands, problem.wanted, problem.signature.autocast, backend)
                gradients = _split(_backward_op(by_log_p_NV, *packed), operands, packed[-1])
            else:
                gradients = ctx.lowered.path.gradients(operands, by_log_p_NV)
        gradients = not_differentiable_again(gradients, (by_log_p_NV, *saved))
        by_input, by_weight, by_bias, by_prior, _, *by_arguments = gradients
        return (None, None, by_input, by_weight, by_bias, by_prior, *by_arguments)


def _lowered(*packed: Any) -> tuple[Lowered, Operands]:
    spec, operands, wanted, autocast = unpack_log_probs(*packed)
    return lower(spec, signature_inside_op(operands, wanted, autocast)), operands


def _compute_op(*packed: Any) -> Tensor:
    lowered, operands = _lowered(*packed)
    out_NV: Tensor = lowered.path.compute(operands)
    return out_NV


def _fake_op(
    input: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    prior_logits: Optional[Tensor],
    arguments: Sequence[Tensor],
    prior_arguments: Sequence[Tensor],
    form: str,
    values: Sequence[float],
    kinds: Sequence[int],
    prior_form: Optional[str],
    prior_values: Sequence[float],
    prior_kinds: Sequence[int],
    floor: float,
    chunk_bytes: Optional[int],
    backend: Optional[str],
    autocast: Optional[torch.dtype],
    wanted: Sequence[bool],
) -> Tensor:
    leading = input.shape[:-1] if prior_form is None else input.shape[:-2]
    classes = input.shape[-1] if weight is None else weight.shape[0]
    dtype, _ = dtypes_of(input.dtype, autocast, has_weight=weight is not None, is_loss=False)
    return input.new_empty(leading.numel(), classes, dtype=dtype)


def _fake_backward_op(
    by_log_p: Tensor,
    input: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    prior_logits: Optional[Tensor],
    arguments: Sequence[Tensor],
    prior_arguments: Sequence[Tensor],
    form: str,
    values: Sequence[float],
    kinds: Sequence[int],
    prior_form: Optional[str],
    prior_values: Sequence[float],
    prior_kinds: Sequence[int],
    floor: float,
    chunk_bytes: Optional[int],
    backend: Optional[str],
    autocast: Optional[torch.dtype],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def gradient(of: Optional[Tensor], needed: bool) -> Tensor:
        if of is None or not needed:
            return by_log_p.new_empty(0)
        return torch.empty_like(of, memory_format=torch.contiguous_format)

    learned = sum(a.numel() for a in (*arguments, *prior_arguments)) if any(wanted[5:]) else 0
    tensors = (input, weight, bias, prior_logits)
    by_input, by_weight, by_bias, by_prior = (gradient(t, w) for t, w in zip(tensors, wanted[:4], strict=True))
    return by_input, by_weight, by_bias, by_prior, by_log_p.new_empty(learned, dtype=torch.float64)


def _compute_backward_op(by_log_p: Tensor, *packed: Any) -> tuple[Tensor, ...]:
    lowered, operands = _lowered(*packed)
    gradients = lowered.path.gradients(operands, by_log_p)
    dense, by_arguments = gradients[:4], gradients[5:]
    arguments = (*operands.arguments, *operands.prior_arguments)
    of_arguments = joined(by_arguments, arguments, by_log_p.new_empty(0, dtype=torch.float64))
    return (*(by_log_p.new_empty(0) if g is None else g for g in dense), of_arguments)


def _split(results: Sequence[Tensor], operands: Operands, wanted: Sequence[bool]) -> list[Optional[Tensor]]:
    """One gradient for each operand that may want one, None for the token weights, which there are none of."""
    *dense, of_arguments = results
    return split((*dense, None), of_arguments, (*operands.arguments, *operands.prior_arguments), wanted)


_op = torch.library.custom_op(
    "sigsoftmax::log_probs",
    _compute_op,
    mutates_args=(),
    schema=torch.library.infer_schema(_fake_op, mutates_args=()),
)
_op.register_fake(_fake_op)
_backward_op = torch.library.custom_op(
    "sigsoftmax::log_probs_backward",
    _compute_backward_op,
    mutates_args=(),
    schema=torch.library.infer_schema(_fake_backward_op, mutates_args=()),
)
_backward_op.register_fake(_fake_backward_op)


def _op_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments, ctx.options, ctx.wanted = len(inputs[4]), inputs[6:], inputs[-1]
    ctx.save_for_backward(*inputs[:4], *inputs[4], *inputs[5])


def _op_gradients(ctx: Any, by_log_p: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    operands = _operands(saved, ctx.arguments)
    packed = (*saved[:4], list(operands.arguments), list(operands.prior_arguments), *ctx.options)
    gradients = _split(_backward_op(by_log_p, *packed), operands, ctx.wanted)
    dense = not_differentiable_again(gradients, (by_log_p, *saved))
    by_arguments = list(dense[5:])
    of_member, of_prior = by_arguments[: ctx.arguments], by_arguments[ctx.arguments :]
    return (*dense[:4], of_member, of_prior, *nothing_for(ctx.options))


_op.register_autograd(_op_gradients, setup_context=_op_context)


def _traced_log_probs(spec: LogProbsSpec, operands: Operands) -> Tensor:
    signature, backend = traced_signature(spec, operands)
    problem = log_probs_problem(spec, signature)
    if backend == REFERENCE:
        return plain_log_probs(problem, operands)
    out_NV = _op(*pack_log_probs(spec, operands, signature.wanted, signature.autocast, backend))
    return out_NV.view(*problem.leading, problem.num_classes)
