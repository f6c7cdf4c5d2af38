"""Singular values and numerical rank of a log-output matrix that fits in memory.

The numerical rank is the number of singular values above a threshold, so a rank without its threshold means nothing.

Shapes: M words, T contexts; R = min(M, T) singular values, the largest first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sigsoftmax.records.spectra import Spectrum

__all__ = ["spectrum"]


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
