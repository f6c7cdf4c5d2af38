"""Singular values of log-output matrices, and the ranks that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Spectrum"]

EPS32 = 2.0**-23
EPS64 = 2.0**-52


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
