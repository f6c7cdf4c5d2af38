"""Log-probabilities of every class as one differentiable operation, lowered and run as losses are (``op``).

Shapes: N tokens, K components, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax import torch_internals
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LogProbsResults, Problem
from sigsoftmax.contract.signature import is_recording, signature_of
from sigsoftmax.contract.spec import LogProbsSpec, log_probs_spec
from sigsoftmax.losses.extras import Extras, named_extras
from sigsoftmax.losses.gradients import Gradients, RecomputingFunction, is_traced
from sigsoftmax.losses.lowering import REFERENCE, Lowered, lower, plain_log_probs
from sigsoftmax.losses.packing import PackedOp, TracedCall, fake_gradients, packed_gradients, traced_problem
from sigsoftmax.losses.validation import log_probs_problem


def log_probs(spec: LogProbsSpec, operands: Operands) -> Tensor | tuple[Tensor, Extras]:
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


def _named(problem: Problem[LogProbsSpec], results: Sequence[Tensor | None]) -> Tensor | tuple[Tensor, Extras]:
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


def _compute_op(lowered: Lowered, operands: Operands, by_log_p_NV: Tensor | None) -> tuple[Tensor, ...]:
    """Log-probabilities without elements and their gradients, or log-probabilities and gradients without elements."""
    problem, log_normalizer_NK, input = lowered.problem, None, operands.input
    gradients: Gradients = [None] * len(problem.wanted.flat)
    if by_log_p_NV is None:
        out_NV, log_normalizer_NK = lowered.path.compute(operands)
    else:
        out_NV = input.new_empty(0, problem.num_classes, dtype=problem.dtype)
        gradients = lowered.path.gradients(operands, by_log_p_NV)
    if log_normalizer_NK is None:
        log_normalizer_NK = input.new_empty(0, problem.components, dtype=problem.compute_dtype)
    numbers = input.new_empty(0, dtype=torch.float64)
    return out_NV, log_normalizer_NK, *packed_gradients(gradients, operands, numbers)


def _fake_op(call: TracedCall) -> tuple[Tensor, ...]:
    input, weight = call.operands[:2]
    classes = input.shape[-1] if weight is None else weight.shape[0]
    arithmetic, dtype = call.dtypes()
    return (
        input.new_empty(call.rows, classes, dtype=dtype),
        input.new_empty(call.rows if call.options["extras"][0] else 0, call.components, dtype=arithmetic),
        *fake_gradients(call.operands, call.needed, input.new_empty(0, dtype=torch.float64)),
    )


_op = PackedOp("sigsoftmax::log_probs", LogProbsSpec, log_probs_spec, 2, _compute_op, _fake_op)
_op.register_recomputing_backward()


def _traced_log_probs(spec: LogProbsSpec, operands: Operands) -> Tensor | tuple[Tensor, Extras]:
    problem, backend = traced_problem(log_probs_problem, spec, operands)
    if backend == REFERENCE:
        return _named(problem, plain_log_probs(problem, operands))
    return _named(problem, _op.op(*_op.pack(spec, operands, problem.signature, backend))[:2])
