"""Singular values and numerical rank of a log-output matrix that fits in memory.

The numerical rank is the number of singular values above a threshold, so a rank without its threshold means nothing.

Shapes: M words, T contexts; R = min(M, T) singular values, the largest first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Spectrum", "spectrum"]

EPS32 = torch.finfo(torch.float32).eps
EPS64 = torch.finfo(torch.float64).eps


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """The singular values of an M x T matrix, computed in float64, and the ranks that follow."""

    KIND: ClassVar[str] = "spectrum"
    VERSION: ClassVar[int] = 1

    source: str
    """what the matrix is, in words"""
    words: int
    contexts: int
    singular_values: tuple[float, ...]

    @property
    def largest(self) -> float:
        return self.singular_values[0]

    @property
    def press32_threshold(self) -> float:
        """0.5 sqrt(M + T + 1) sigma_max eps of float32: the rule behind the ranks in the paper's tables."""
        return 0.5 * math.sqrt(self.words + self.contexts + 1) * self.largest * EPS32

    @property
    def float64_threshold(self) -> float:
        """max(M, T) sigma_max eps of float64: numpy's rule."""
        return max(self.words, self.contexts) * self.largest * EPS64

    def rank(self, threshold: float) -> int:
        """How many singular values exceed the threshold, which is absolute."""
        return sum(value > threshold for value in self.singular_values)

    @property
    def press32_rank(self) -> int:
        return self.rank(self.press32_threshold)

    @property
    def float64_rank(self) -> int:
        return self.rank(self.float64_threshold)


def spectrum(log_probs_TM: Tensor, *, source: str = "log-probabilities") -> Spectrum:
    """The spectrum of a matrix of log-probabilities, one context a row."""
    if log_probs_TM.ndim != 2 or not log_probs_TM.is_floating_point() or not log_probs_TM.numel():
        raise ValueError(
            "expected a floating-point matrix of log-probabilities with at least one row and one column, got "
            f"{log_probs_TM.dtype} of shape {tuple(log_probs_TM.shape)}"
        )
    finite = torch.isfinite(log_probs_TM)
    if not finite.all():
        row, column = (int(i) for i in (~finite).nonzero()[0])
        raise ValueError(
            f"a matrix with infinite or NaN entries has no singular values; the first is {log_probs_TM[row, column]} "
            f"at row {row}, column {column}. Leave masked words out of the matrix"
        )
    contexts, words = log_probs_TM.shape
    values = torch.linalg.svdvals(log_probs_TM.detach().to(torch.float64))
    return Spectrum(source=source, words=words, contexts=contexts, singular_values=tuple(values.tolist()))
