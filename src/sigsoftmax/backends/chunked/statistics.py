"""The path of token statistics: log-probabilities of targets and of the likeliest classes, entropies, normalisers.

The log-probabilities of every class exist for a block of rows at a time, and so does their gradient.

Shapes: N tokens, K components, V classes, C columns of statistics, T likeliest classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.every_class import ROWS, EveryClassPath
from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.contract import value_checks
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import MIB, Problem
from sigsoftmax.contract.spec import StatisticsSpec
from sigsoftmax.contract.statistics import LogProbsGradient, StatisticsArithmetic

DEVICE_BLOCK_BYTES = 64 * MIB
"""Intermediate results of a block, of which there are several, have this size where no cache is to be stayed in."""


class ChunkedStatistics(EveryClassPath[StatisticsSpec]):
    """Statistics of tokens by torch operations on blocks of rows, on any device."""

    def __init__(self, problem: Problem[StatisticsSpec]) -> None:
        super().__init__(problem, ROWS)
        has_target = problem.signature.operands.target is not None
        self.arithmetic = StatisticsArithmetic(problem.spec, problem.components, has_target=has_target)

    def max_rows(self, routines: FormRows) -> int | None:
        if routines.max_rows is not None:
            return routines.max_rows
        return max(1, DEVICE_BLOCK_BYTES // (self.problem.compute_dtype.itemsize * self.problem.num_classes))

    def compute(self, operands: Operands) -> tuple[Tensor, Tensor]:
        problem, spec = self.problem, self.problem.spec
        target_N = None if operands.target is None else problem.target(operands)
        if target_N is not None:
            value_checks.check_target(target_N, problem.num_classes, spec.ignore_index)
        shape = (problem.num_tokens, self.arithmetic.columns)
        out_NC = torch.empty(shape, dtype=problem.compute_dtype, device=problem.device)
        indices_NT = torch.empty((problem.num_tokens, spec.topk), dtype=torch.int64, device=problem.device)
        for tokens, block in self.log_probs_of_blocks(operands):
            target_n = None if target_N is None else target_N[tokens]
            out_NC[tokens], indices_NT[tokens] = self.arithmetic.of_block(
                block.log_p_nV, block.log_normalizer_nK, target_n
            )
        return out_NC, indices_NT

    def gradients(self, operands: Operands, by_statistics_NC: Tensor) -> Sequence[Tensor | None]:
        target_N = None if operands.target is None else self.problem.target(operands)

        def by_log_p(tokens: slice, log_p_nV: Tensor) -> LogProbsGradient:
            target_n = None if target_N is None else target_N[tokens]
            return self.arithmetic.gradient(log_p_nV, target_n, by_statistics_NC[tokens].to(log_p_nV.dtype))

        return self.backpropagated(operands, by_log_p)
