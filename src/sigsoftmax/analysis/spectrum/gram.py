"""Singular values from a Gram matrix: fast and small, but good to about 1e-7 of the largest only.

A Gram matrix holds squares, so what float64 rounds off at 1e-16 sigma_max^2 hides every singular value below 1e-8
sigma_max. In return a matrix of any length is summed up in M x M numbers, or T x T where contexts are fewer.

Shapes: M words, T contexts, B contexts of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["WordGram", "add_product", "gram_error", "squared_singular_values"]

PANELS = 8
"""The triangle of a symmetric update is covered by so many panels: 9/16 of the work of the full product."""
UNIT = 2.0**-53


class WordGram:
    """The sum of A^T A over blocks A of contexts; only the upper triangle is kept up to date."""

    KIND = "gram"

    def __init__(self, words: int, device: torch.device) -> None:
        self.gram_MM = torch.zeros(words, words, dtype=torch.float64, device=device)

    def add(self, block_BM: Tensor) -> None:
        add_product(self.gram_MM, block_BM.to(torch.float64).T)

    def squared_singular_values(self) -> Tensor:
        """The eigenvalues, the largest first; rounding makes some of them negative."""
        return _eigenvalues(self.gram_MM)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        return {"gram": self.gram_MM.cpu().numpy()}

    def restore(self, arrays: dict[str, NDArray[np.generic]]) -> None:
        self.gram_MM.copy_(torch.from_numpy(arrays["gram"]))


def squared_singular_values(rows: Sequence[Tensor]) -> Tensor:
    """The eigenvalues of A A^T or A^T A, whichever is smaller, of a matrix that is given as blocks of its rows."""
    contexts, words = sum(len(block) for block in rows), rows[0].shape[1]
    if words <= contexts:
        gram = WordGram(words, rows[0].device)
        for block in rows:
            gram.add(block)
        return gram.squared_singular_values()
    gram_TT = torch.zeros(contexts, contexts, dtype=torch.float64, device=rows[0].device)
    step = max(1, 2**25 // contexts)
    for first in range(0, words, step):
        columns = [block[:, first : first + step].to(torch.float64) for block in rows]
        add_product(gram_TT, torch.cat(columns) if len(columns) > 1 else columns[0])
    return _eigenvalues(gram_TT)


def add_product(gram_NN: Tensor, factor_NK: Tensor) -> None:
    """gram += factor factor^T, in place, in the upper triangle and a little below it."""
    size = len(gram_NN)
    step = -(-size // PANELS)
    for first in range(0, size, step):
        gram_NN[first : first + step, first:].addmm_(factor_NK[first : first + step], factor_NK[first:].T)


def gram_error(squared_values: Tensor, contexts: int, words: int) -> float:
    """How far an eigenvalue of the Gram matrix may be from the squared singular value.

    Two estimates that were compared with an SVD (docs/analysis.md), for the eigenvalues and for the sum of rounded
    products; and what the matrix itself shows, since no square is negative.
    """
    largest, trace = float(squared_values[0]), float(squared_values.sum())
    size, length = len(squared_values), max(contexts, words)
    of_eigenvalues = (4.0 + 0.5 * math.sqrt(size)) * UNIT * largest
    # Sums run over slices of some hundred terms, and then over slices; roundings of independent sign add as the root.
    terms = 256.0 + length / 256.0
    of_sums = 2.0 * math.sqrt(terms / size) * UNIT * trace
    seen = 4.0 * max(-float(squared_values[-1]), 0.0)
    return max(of_eigenvalues + of_sums, seen)


def _eigenvalues(gram_NN: Tensor) -> Tensor:
    if not bool(torch.isfinite(gram_NN.diagonal()).all()):
        raise ValueError(
            "the squares of the entries overflow float64, so that the matrix has no Gram matrix; scale the entries, or "
            "use method='exact'"
        )
    return torch.linalg.eigvalsh(gram_NN, UPLO="U").flip(0)
