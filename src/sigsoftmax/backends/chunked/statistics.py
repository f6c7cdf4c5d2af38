"""The path of token statistics: log-probabilities of targets and of the likeliest classes, entropies, normalisers.

The log-probabilities of every class exist for a block of rows at a time, and so does their gradient. What a loss
computes too is left to it, since its rows are faster: the values without likeliest classes, and the gradient of
log-probabilities of targets alone.

Shapes: N tokens, n of a block, K components, V classes, C columns of statistics, I columns of likeliest classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.chunked.log_probs import ROWS, EveryClassPath
from sigsoftmax.contract import value_checks
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import MIB, LossPath, LossResults, Problem, Refusal
from sigsoftmax.contract.spec import LossSpec, StatisticsSpec
from sigsoftmax.contract.statistics import LogProbsGradient, StatisticsArithmetic

LowerLoss = Callable[[Problem[LossSpec]], LossPath | Refusal]
DEVICE_BLOCK_BYTES = 64 * MIB
"""Intermediate results of a block, of which there are several, have this size where no cache is to be stayed in."""


class ChunkedStatistics(EveryClassPath[StatisticsSpec]):
    """Statistics of tokens by torch operations on blocks of rows, on any device."""

    def __init__(self, problem: Problem[StatisticsSpec], lower_loss: LowerLoss) -> None:
        super().__init__(problem, ROWS)
        self.arithmetic = StatisticsArithmetic(problem)
        self.values: LossPath | None = None
        """a loss whose extras are all that is asked for"""
        self.log_probs: LossPath | None = None
        """a loss that has the gradient of the log-probabilities of targets"""
        if self.arithmetic.has_target and problem.spec.temperature == 1.0:
            self.log_probs = self._loss(lower_loss, None)
            if self.log_probs is not None:
                self.description += f"; log-probabilities alone as {self.log_probs.description}"
            if not problem.spec.topk:
                asked = [name for name in ("argmax", "entropy") if getattr(problem.spec, name)]
                self.values = self._loss(lower_loss, ("log_normalizer", *asked))

    def _loss(self, lower_loss: LowerLoss, extras: tuple[str, ...] | None) -> LossPath | None:
        """The losses of the same tokens, not reduced, in the dtype of the arithmetic; None if they are refused."""
        problem: Any = self.problem
        spec = self.problem.spec.losses(extras)
        path = lower_loss(replace(problem, spec=spec, dtype=self.problem.compute_dtype))
        return None if isinstance(path, Refusal) else path

    def max_rows(self, routines: FormRows) -> int | None:
        if routines.max_rows is not None:
            return routines.max_rows
        return max(1, DEVICE_BLOCK_BYTES // (self.problem.compute_dtype.itemsize * self.problem.num_classes))

    def compute(self, operands: Operands) -> tuple[Tensor, Tensor]:
        problem, spec = self.problem, self.problem.spec
        if self.values is not None:
            return self._values_of_loss(self.values.compute(operands))
        target_N = None if operands.target is None else problem.target(operands)
        if target_N is not None:
            value_checks.check_target(target_N, problem.num_classes, spec.ignore_index)
        shape = (problem.num_tokens, self.arithmetic.columns)
        out_NC = torch.empty(shape, dtype=problem.compute_dtype, device=problem.device)
        shape = (problem.num_tokens, self.arithmetic.index_columns)
        indices_NI = torch.empty(shape, dtype=torch.int64, device=problem.device)
        for tokens, block in self.log_probs_of_blocks(operands):
            target_n = None if target_N is None else target_N[tokens]
            out_NC[tokens], indices_NI[tokens] = self.arithmetic.of_block(
                block.log_p_nV, block.log_normalizer_nK, target_n
            )
        return out_NC, indices_NI

    def _values_of_loss(self, results: LossResults) -> tuple[Tensor, Tensor]:
        log_probs_N1, normalizer_NK = -results.loss.reshape(-1, 1), results.log_normalizer_NK
        assert normalizer_NK is not None
        entropy = [] if results.entropy_N is None else [results.entropy_N.unsqueeze(-1)]
        columns_NC = torch.cat([log_probs_N1, *entropy, normalizer_NK.view(-1, self.problem.components)], -1)
        if results.argmax_N is not None:
            return columns_NC, results.argmax_N.unsqueeze(-1)
        return columns_NC, torch.empty((columns_NC.shape[0], 0), dtype=torch.int64, device=columns_NC.device)

    def gradients(self, operands: Operands, by_groups: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        by_target_N1, *by_others = by_groups
        if self.log_probs is not None and by_target_N1 is not None and all(by is None for by in by_others):
            return self.log_probs.compute(operands, -by_target_N1.reshape(self.problem.leading)).gradients
        by_statistics_NC = self.arithmetic.joined(by_groups)
        target_N = None if operands.target is None else self.problem.target(operands)

        def by_log_p(tokens: slice, log_p_nV: Tensor) -> LogProbsGradient:
            target_n = None if target_N is None else target_N[tokens]
            return self.arithmetic.gradient(log_p_nV, target_n, by_statistics_NC[tokens].to(log_p_nV.dtype))

        return self.backpropagated(operands, by_log_p)
