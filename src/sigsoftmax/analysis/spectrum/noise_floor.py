"""Estimated errors of singular values, of which the noise floor of a rank is made.

``Spectrum.noise_floor`` in ``records.schemas.spectra`` puts them together; below it nothing can be counted.

Shapes: R singular values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["entry_noise", "gram_error", "svd_error"]

EPS64 = 2.0**-52


def svd_error(largest: float, contexts: int, vocabulary: int) -> float:
    """An estimate of the error of a singular value, compared with matrices of known rank (docs/analysis.md)."""
    return 0.2 * math.sqrt(contexts + vocabulary + 1) * EPS64 * largest


def entry_noise(values_R: Tensor, contexts: int, vocabulary: int, precision: torch.dtype) -> float:
    """The norm of a matrix of errors, if every entry is off by eps of its precision, with independent signs."""
    root_mean_square = float(values_R.norm()) / math.sqrt(vocabulary * contexts)
    return torch.finfo(precision).eps * root_mean_square * (math.sqrt(vocabulary) + math.sqrt(contexts))


def gram_error(squared: Tensor, contexts: int, vocabulary: int) -> float:
    """An estimate of the distance between an eigenvalue of the Gram matrix and the squared singular value.

    Two estimates that were compared with an SVD (docs/analysis.md), for the eigenvalues and for the sum of rounded
    products; and what the matrix itself shows, since no square is negative.
    """
    unit, largest, trace = 0.5 * EPS64, float(squared[0]), float(squared.sum())
    of_eigenvalues = (4.0 + 0.5 * math.sqrt(len(squared))) * unit * largest
    # Sums run over slices of some hundred terms, and then over slices; roundings of independent sign add as the root.
    terms = 256.0 + max(contexts, vocabulary) / 256.0
    of_sums = 2.0 * math.sqrt(terms / len(squared)) * unit * trace
    return max(of_eigenvalues + of_sums, 4.0 * max(-float(squared[-1]), 0.0))
