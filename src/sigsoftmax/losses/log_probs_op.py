"""Log-probabilities of every class as one differentiable operation, lowered and run as losses are (``op``)."""

# No postponed annotations here: torch.library reads the schema from them.
import math
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from sigsoftmax import torch_internals
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LogProbsResults, Problem, dtypes_of
from sigsoftmax.contract.rows import compute_dtype
from sigsoftmax.contract.signature import is_recording, signature_inside_op, signature_of
from sigsoftmax.contract.spec import LogProbsSpec, log_probs_spec
from sigsoftmax.losses.extras import Extras, named_extras
from sigsoftmax.losses.gradients import Gradients, RecomputingFunction, is_traced
from sigsoftmax.losses.lowering import REFERENCE, Lowered, lower, plain_log_probs
from sigsoftmax.losses.packing import PackedOp, fake_gradients, packed_gradients, traced_problem
from sigsoftmax.losses.validation import log_probs_problem


def log_probs(spec: LogProbsSpec, operands: Operands) -> Union[Tensor, tuple[Tensor, Extras]]:
    """Log-probabilities of every class, in the leading dimensions and the classes; with their extras if asked for."""
    if is_recording():
        return _traced_log_probs(spec, operands)
    lowered = lower(spec, signature_of(operands))
    problem = lowered.problem
    if lowered.path is None:
        return _named(problem, plain_log_probs(problem, operands))
    if problem.wanted.any:
        results = torch_internals.apply_eagerly(
            RecomputingFunction, _compute, _gradients, 1, lowered, len(operands.arguments), None, *operands.flat
        )
    else:
        results = _compute(lowered, operands)
    return _named(problem, results)


def _named(problem: Problem[LogProbsSpec], results: Sequence[Optional[Tensor]]) -> Union[Tensor, tuple[Tensor, Extras]]:
    """Results in the leading dimensions."""
    out_NV, *extras = results
    assert out_NV is not None
    out = out_NV.view(*problem.leading, problem.num_classes)
    return out if problem.spec.extras is None else (out, named_extras(problem, extras))


def _compute(lowered: Lowered, operands: Operands) -> LogProbsResults:
    results: LogProbsResults = lowered.path.compute(operands)
    return results


def _gradients(lowered: Lowered, operands: Operands, by_log_p_NV: Tensor) -> Gradients:
    if is_traced(by_log_p_NV):
        return _op.gradients(lowered.problem, operands, by_log_p_NV)
    return lowered.path.gradients(operands, by_log_p_NV)


def _compute_op(input: Tensor, *packed: Any) -> tuple[Tensor, ...]:
    """Log-probabilities without elements and their gradients, or log-probabilities and gradients without elements."""
    spec, operands, wanted, autocast, by_log_p_NV = _op.unpack((input, *packed))
    lowered = lower(spec, signature_inside_op(operands, wanted, autocast))
    problem, log_normalizer_NK = lowered.problem, None
    gradients: Gradients = [None] * len(wanted.flat)
    if by_log_p_NV is None:
        out_NV, log_normalizer_NK = lowered.path.compute(operands)
    else:
        out_NV = input.new_empty(0, problem.num_classes, dtype=problem.dtype)
        gradients = lowered.path.gradients(operands, by_log_p_NV)
    if log_normalizer_NK is None:
        log_normalizer_NK = input.new_empty(0, problem.components, dtype=problem.compute_dtype)
    numbers = input.new_empty(0, dtype=torch.float64)
    return out_NV, log_normalizer_NK, *packed_gradients(gradients, operands, numbers)


def _fake_op(
    input: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    prior_logits: Optional[Tensor],
    arguments: Sequence[Tensor],
    prior_arguments: Sequence[Tensor],
    by_output: Optional[Tensor],
    form: str,
    values: Sequence[float],
    kinds: Sequence[int],
    prior_form: Optional[str],
    prior_values: Sequence[float],
    prior_kinds: Sequence[int],
    floor: float,
    chunk_bytes: Optional[int],
    extras: Sequence[bool],
    backend: Optional[str],
    autocast: Optional[torch.dtype],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    leading, components = (input.shape[:-1], 1) if prior_form is None else (input.shape[:-2], input.shape[-2])
    tokens = math.prod(leading) if by_output is None else 0
    classes = input.shape[-1] if weight is None else weight.shape[0]
    product_dtype, dtype = dtypes_of(input.dtype, autocast, has_weight=weight is not None, is_loss=False)
    operands = Operands(input, weight, bias, prior_logits, arguments=arguments, prior_arguments=prior_arguments)
    needed = [by_output is not None and flag for flag in wanted]
    return (  # type: ignore[return-value]
        input.new_empty(tokens, classes, dtype=dtype),
        input.new_empty(tokens if extras[0] else 0, components, dtype=compute_dtype(product_dtype)),
        *fake_gradients(operands, needed, input.new_empty(0, dtype=torch.float64)),
    )


_op = PackedOp("sigsoftmax::log_probs", log_probs_spec, _compute_op, _fake_op)
_op.register_recomputing_backward()


def _traced_log_probs(spec: LogProbsSpec, operands: Operands) -> Union[Tensor, tuple[Tensor, Extras]]:
    problem, backend = traced_problem(log_probs_problem, spec, operands)
    if backend == REFERENCE:
        return _named(problem, plain_log_probs(problem, operands))
    return _named(problem, _op.op(*_op.pack(spec, operands, problem.signature, backend))[:2])
