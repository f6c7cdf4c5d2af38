"""The path of log-probabilities of every class: of given logits, or of a mixture without its N x K x V.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.every_class import ROWS, EveryClassPath
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.rows import compute_dtype
from sigsoftmax.contract.spec import LogProbsSpec
from sigsoftmax.contract.statistics import LogProbsGradient


class ChunkedLogProbs(EveryClassPath[LogProbsSpec]):
    """Log-probabilities by torch operations on blocks of rows, on any device."""

    def __init__(self, problem: Problem[LogProbsSpec]) -> None:
        super().__init__(problem, ROWS)

    def compute(self, operands: Operands) -> Tensor:
        problem = self.problem
        shape = (problem.num_tokens, problem.num_classes)
        out_NV = torch.empty(shape, dtype=problem.dtype, device=problem.device)
        for tokens, block in self.log_probs_of_blocks(operands):
            out_NV[tokens] = block.log_p_nV
        return out_NV

    def gradients(self, operands: Operands, by_log_p_NV: Tensor) -> Sequence[Tensor | None]:
        dtype = compute_dtype(self.problem.product_dtype)
        return self.backpropagated(operands, lambda tokens, _: LogProbsGradient(by_log_p_NV[tokens].to(dtype)))
