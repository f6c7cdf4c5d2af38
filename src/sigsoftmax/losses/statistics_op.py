"""Statistics of tokens as one differentiable operation, lowered and run as losses are (``op``).

All statistics are columns of one result, so that they have one incoming gradient; logits are computed again for it.

Shapes: N tokens, K components, V classes, T likeliest classes, C columns of numbers, I of classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax import torch_internals
from sigsoftmax.contract import value_checks
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.signature import is_recording, signature_of
from sigsoftmax.contract.spec import StatisticsSpec, statistics_spec
from sigsoftmax.contract.statistics import GROUPS, StatisticsArithmetic, TokenStatistics
from sigsoftmax.losses.gradients import Gradients, RecomputingFunction, is_traced
from sigsoftmax.losses.lowering import REFERENCE, Lowered, lower, plain_statistics
from sigsoftmax.losses.packing import PackedOp, TracedCall, fake_gradients, packed_gradients, traced_problem
from sigsoftmax.losses.validation import statistics_problem


def statistics(spec: StatisticsSpec, operands: Operands) -> TokenStatistics:
    """The statistics of tokens that a specification asks for, in the leading dimensions."""
    if is_recording():
        problem, backend = traced_problem(statistics_problem, spec, operands)
        if backend == REFERENCE:
            results = plain_statistics(problem, operands)
        else:
            results = _op.op(*_op.pack(spec, operands, problem.signature, backend))[:2]
        return _named(problem, StatisticsArithmetic(problem).groups(results[0]), results[1])
    lowered = lower(spec, signature_of(operands))
    problem = lowered.problem
    if lowered.path is None:
        if operands.target is not None and not torch_internals.is_wrapped(operands.target):
            value_checks.check_target(problem.target(operands), problem.num_classes, spec.ignore_index)
        values_NC, indices_NI = plain_statistics(problem, operands)
        return _named(problem, StatisticsArithmetic(problem).groups(values_NC), indices_NI)
    if problem.wanted.any:
        # Each group is a result of its own, so that it is known which of them a loss depends on.
        *groups, indices_NI = torch_internals.apply_eagerly(
            *(RecomputingFunction, _compute, _gradients, GROUPS, lowered, len(operands.arguments), None),
            *operands.flat,
        )
    else:
        *groups, indices_NI = _compute(lowered, operands)
    return _named(problem, groups, indices_NI)


def _compute(lowered: Lowered, operands: Operands) -> tuple[Tensor, ...]:
    values_NC, indices_NI = lowered.path.compute(operands)
    # Not views of one tensor, which could not be changed in place.
    return *(group.clone() for group in StatisticsArithmetic(lowered.problem).groups(values_NC)), indices_NI


def _gradients(lowered: Lowered, operands: Operands, *by_groups: Tensor | None) -> Gradients:
    if any(by is not None and is_traced(by) for by in by_groups):
        by_statistics_NC = StatisticsArithmetic(lowered.problem).joined(by_groups)
        return _op.gradients(lowered.problem, operands, by_statistics_NC)
    gradients: Gradients = lowered.path.gradients(operands, by_groups)
    return gradients


def _named(problem: Problem[StatisticsSpec], groups: Sequence[Tensor], indices_NI: Tensor) -> TokenStatistics:
    """Groups of columns by their names and in the leading dimensions."""
    spec, leading = problem.spec, problem.leading
    at_target_N1, entropy_N1, normalizer_NK, largest_NT = groups
    return TokenStatistics(
        None if problem.signature.operands.target is None else at_target_N1.reshape(leading),
        entropy_N1.reshape(leading) if spec.entropy else None,
        normalizer_NK.reshape(leading if spec.prior is None else (*leading, problem.components)),
        largest_NT.reshape(*leading, spec.topk) if spec.topk else None,
        indices_NI[:, int(spec.argmax) :].reshape(*leading, spec.topk) if spec.topk else None,
        indices_NI[:, 0].reshape(leading) if spec.argmax else None,
    )


# The op


def _compute_op(lowered: Lowered, operands: Operands, by_statistics_NC: Tensor | None) -> tuple[Tensor, ...]:
    """Statistics and gradients without elements, or statistics without elements and their gradients."""
    input, gradients = operands.input, [None] * len(lowered.problem.wanted.flat)
    if by_statistics_NC is None:
        values_NC, indices_NI = lowered.path.compute(operands)
    else:
        arithmetic = lowered.path.arithmetic
        values_NC = input.new_empty(0, arithmetic.columns, dtype=lowered.problem.compute_dtype)
        indices_NI = input.new_empty(0, arithmetic.index_columns, dtype=torch.int64)
        gradients = lowered.path.gradients(operands, arithmetic.groups(by_statistics_NC))
    numbers = input.new_empty(0, dtype=torch.float64)
    return values_NC, indices_NI, *packed_gradients(gradients, operands, numbers)


def _fake_op(call: TracedCall) -> tuple[Tensor, ...]:
    input, options = call.operands.input, call.options
    columns = int(call.operands.target is not None) + int(options["entropy"]) + call.components + options["topk"]
    return (
        input.new_empty(call.rows, columns, dtype=call.dtypes()[0]),
        input.new_empty(call.rows, int(options["argmax"]) + options["topk"], dtype=torch.int64),
        *fake_gradients(call.operands, call.needed, input.new_empty(0, dtype=torch.float64)),
    )


_op = PackedOp("sigsoftmax::token_statistics", StatisticsSpec, statistics_spec, 2, _compute_op, _fake_op)
_op.register_recomputing_backward()
