"""Singular values from a Gram matrix or a QR factorisation, of a matrix whose rows stream in.

A Gram matrix is fast and small, but good to about 1e-7 of the largest singular value only: it holds squares, so what
float64 rounds off at 1e-16 sigma_max^2 hides every singular value below 1e-8 sigma_max. In return a matrix of any
length is summed up in V x V numbers, or N x N where contexts are fewer.

A QR factorisation is good to float64's own precision. The factor R of [R; block] has the singular values of all rows
before, so that R of V x V takes their place. No squares are formed: what is lost is about 1e-15 of the largest value.

Shapes: N contexts, V vocabulary, B contexts of a block, C columns of a factor, R = min(N, V) singular values,
the largest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigsoftmax.analysis.spectrum.noise_floor import gram_error, svd_error

__all__ = [
    "GramMatrix",
    "SingularValues",
    "TriangularFactor",
    "add_product",
    "damped_inverse",
    "exact_values",
    "gram_values",
]

PANELS = 8
"""The triangle of a symmetric update is covered by so many panels: 9/16 of the work of the full product."""
MOST_STACKED = 2**31 - 1
"""entries of a matrix that every LAPACK and cuSOLVER can index"""
DAMPING = 1e-3
"""added to the diagonal of a matrix that is inverted, relative to the mean of its entries"""

Arrays = dict[str, NDArray[np.generic]]


class SingularValues(NamedTuple):
    """Singular values, how they were found, and how far they or their squares may be off."""

    values_R: Tensor
    method: str
    squared_error: float = 0.0
    value_error: float = 0.0


class GramMatrix:
    """The sum of A^T A over blocks A of contexts; only the upper triangle is kept up to date."""

    KIND = "gram"

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.gram_VV = torch.zeros(vocabulary, vocabulary, dtype=torch.float64, device=device)

    def add(self, block_BV: Tensor) -> None:
        add_product(self.gram_VV, block_BV.to(torch.float64).T)

    def singular_values(self, contexts: int) -> SingularValues:
        return _values_of_gram(self.gram_VV, contexts, len(self.gram_VV))

    def arrays(self) -> Arrays:
        return {"gram": self.gram_VV.cpu().numpy()}

    def restore(self, arrays: Arrays) -> None:
        self.gram_VV.copy_(torch.from_numpy(arrays["gram"]))


class TriangularFactor:
    """The R of a QR factorisation of all rows so far, and rows that have not been worked in."""

    KIND = "qr"

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.factor_VV: Tensor | None = None
        self.pending: list[Tensor] = []
        # As many rows as the factor has make the factorisation efficient; a very wide matrix takes fewer at a time.
        self.stack_rows = max(1, min(vocabulary, MOST_STACKED // vocabulary - vocabulary))

    def add(self, block_BV: Tensor) -> None:
        # A reader may fill the same memory again for its next block.
        self.pending.append(block_BV.to(torch.float64, copy=True))
        rows = sum(len(block) for block in self.pending)
        if rows >= self.stack_rows + (self.vocabulary if self.factor_VV is None else 0):
            self.factor_VV, self.pending = _triangle(self._stacked()), []

    def singular_values(self, contexts: int) -> SingularValues:
        return exact_values(self._stacked(), contexts)._replace(method=self.KIND)

    def arrays(self) -> Arrays:
        parts = {"factor": self.factor_VV, "pending": torch.cat(self.pending) if self.pending else None}
        return {name: part.cpu().numpy() for name, part in parts.items() if part is not None}

    def restore(self, arrays: Arrays) -> None:
        parts = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        self.factor_VV = parts.get("factor")
        self.pending = [parts["pending"]] if "pending" in parts else []

    def _stacked(self) -> Tensor:
        """The factor and the pending rows as one matrix, which takes their place."""
        parts = ([] if self.factor_VV is None else [self.factor_VV]) + self.pending
        stacked = torch.cat(parts) if len(parts) > 1 else parts[0]
        self.factor_VV, self.pending = None, [stacked]
        return stacked


def gram_values(blocks: Sequence[Tensor]) -> SingularValues:
    """Singular values from A A^T or A^T A, whichever is smaller, of a matrix that is given as blocks of its rows."""
    contexts, vocabulary = sum(len(block) for block in blocks), blocks[0].shape[1]
    if vocabulary <= contexts:
        gram = GramMatrix(vocabulary, blocks[0].device)
        for block in blocks:
            gram.add(block)
        return gram.singular_values(contexts)
    gram_NN = torch.zeros(contexts, contexts, dtype=torch.float64, device=blocks[0].device)
    step = max(1, 2**25 // contexts)
    for first in range(0, vocabulary, step):
        columns = [block[:, first : first + step].to(torch.float64) for block in blocks]
        add_product(gram_NN, torch.cat(columns) if len(columns) > 1 else columns[0])
    return _values_of_gram(gram_NN, contexts, vocabulary)


def exact_values(matrix: Tensor, contexts: int | None = None) -> SingularValues:
    """Singular values of a float64 matrix by an SVD; ``contexts`` if more rows than it has went into it."""
    tall = matrix if len(matrix) >= matrix.shape[1] else matrix.T
    if len(tall) > tall.shape[1]:
        tall = _triangle(tall)
    # The Jacobi method, which torch prefers on a GPU, stops at a tolerance of its own.
    values_R = torch.linalg.svdvals(tall, driver="gesvd" if tall.is_cuda else None)
    error = svd_error(float(values_R[0]), contexts or len(matrix), matrix.shape[1])
    return SingularValues(values_R, "svd", value_error=error)


def add_product(gram_NN: Tensor, factor_NC: Tensor) -> None:
    """gram += factor factor^T, in place, in the upper triangle and a little below it."""
    step = -(-len(gram_NN) // PANELS)
    for first in range(0, len(gram_NN), step):
        gram_NN[first : first + step, first:].addmm_(factor_NC[first : first + step], factor_NC[first:].T)


def damped_inverse(gram: Tensor) -> Tensor:
    """Inverse of a positive matrix, damped: directions that nothing uses yet must not take endless steps."""
    size = DAMPING * float(gram.diagonal().mean()) + 1e-300
    return torch.cholesky_inverse(torch.linalg.cholesky(gram + size * torch.eye(len(gram), dtype=gram.dtype)))


def _values_of_gram(gram: Tensor, contexts: int, vocabulary: int) -> SingularValues:
    if not bool(torch.isfinite(gram.diagonal()).all()):
        raise ValueError(
            "the squares of the entries overflow float64, so that the matrix has no Gram matrix; scale the entries, or "
            "use method='exact'"
        )
    # Rounding makes some of the eigenvalues negative, and there may be more of them than R.
    squared = torch.linalg.eigvalsh(gram, UPLO="U").flip(0)
    values_R = squared[: min(contexts, vocabulary)].clamp(min=0.0).sqrt()
    return SingularValues(values_R, "gram", squared_error=gram_error(squared, contexts, vocabulary))


def _triangle(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix, mode="r").R
