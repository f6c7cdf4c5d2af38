"""Singular values to float64's own precision, from a matrix whose rows stream in.

Every row is a row of [R; block], whose QR factor R has the same singular values; so R of M x M takes the place of all
rows before. No squares are formed: what is lost is about 1e-15 of the largest singular value.

Shapes: M words, T contexts, B contexts of a block, R = min(M, T).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["TriangularFactor", "singular_values", "svd_error"]

MOST_STACKED = 2**31 - 1
"""entries of a matrix that every LAPACK and cuSOLVER can index"""
EPS64 = 2.0**-52


class TriangularFactor:
    """The R of a QR factorisation of all rows so far, and rows that have not been worked in."""

    KIND = "qr"

    def __init__(self, words: int, device: torch.device) -> None:
        self.words = words
        self.device = device
        self.factor_MM: Tensor | None = None
        self.pending: list[Tensor] = []
        # As many rows as the factor has make the factorisation efficient; a very wide matrix takes fewer at a time.
        self.stack_rows = max(1, min(words, MOST_STACKED // words - words))

    def add(self, block_BM: Tensor) -> None:
        # A source may fill the same memory again for its next block.
        self.pending.append(block_BM.to(torch.float64, copy=True))
        rows = sum(len(block) for block in self.pending)
        if rows >= self.stack_rows + (self.words if self.factor_MM is None else 0):
            self.factor_MM, self.pending = _triangle(self._stacked()), []

    def singular_values(self) -> Tensor:
        return singular_values(self._stacked())

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        arrays: dict[str, NDArray[np.generic]] = {}
        if self.factor_MM is not None:
            arrays["factor"] = self.factor_MM.cpu().numpy()
        if self.pending:
            arrays["pending"] = torch.cat(self.pending).cpu().numpy()
        return arrays

    def restore(self, arrays: dict[str, NDArray[np.generic]]) -> None:
        self.factor_MM = torch.from_numpy(arrays["factor"]).to(self.device) if "factor" in arrays else None
        self.pending = [torch.from_numpy(arrays["pending"]).to(self.device)] if "pending" in arrays else []

    def _stacked(self) -> Tensor:
        """The factor and the pending rows as one matrix, which takes their place."""
        parts = ([] if self.factor_MM is None else [self.factor_MM]) + self.pending
        stacked = torch.cat(parts) if len(parts) > 1 else parts[0]
        self.factor_MM, self.pending = None, [stacked]
        return stacked


def singular_values(matrix_TM: Tensor) -> Tensor:
    """The singular values of a float64 matrix, the largest first."""
    tall = matrix_TM if len(matrix_TM) >= matrix_TM.shape[1] else matrix_TM.T
    if len(tall) > tall.shape[1]:
        tall = _triangle(tall)
    # The Jacobi method, which torch prefers on a GPU, stops at a tolerance of its own.
    return torch.linalg.svdvals(tall, driver="gesvd" if tall.is_cuda else None)


def svd_error(largest: float, contexts: int, words: int) -> float:
    """How far a singular value may be off: an estimate, compared with matrices of known rank (docs/analysis.md)."""
    return 0.2 * math.sqrt(contexts + words + 1) * EPS64 * largest


def _triangle(matrix_TM: Tensor) -> Tensor:
    return torch.linalg.qr(matrix_TM, mode="r").R
